"""The passes of a norm over a value that is in memory: moments, their combination, normalise with the tail.

Names: i_ program index, o_ offsets, p_ pointer, m_ mask, b_ block value. A value is seen as rows:

    contiguous      [N·C, S]: one row per sample and channel, and the row's channel is one number
    channels-last   [N, S, C]: rows of channels, tiles of BLOCK rows and BLOCK_C channels
    short rows      [N, C, S] by the channels-last kernels: BLOCK covers a row, and a tile is BLOCK_C of them

Where a row or a sample begins is one 64-bit number; offsets from there are 32-bit unless a sample needs more (WIDE).

BEFORE and WHOLE are composed functions (see steps.py): the steps before the norm, and all steps with the norm among
them. Each is one jit function: a tuple of functions would be cached by their names only.
"""

import triton
import triton.language as tl


@triton.jit
def places(o_s, o_c, C, S, SHORT: tl.constexpr, WIDE: tl.constexpr):
    """Offsets in a sample, [BLOCK, BLOCK_C]."""
    if SHORT:
        return (o_c[None, :].to(tl.int64) if WIDE else o_c[None, :]) * S + o_s[:, None]
    return (o_s[:, None].to(tl.int64) if WIDE else o_s[:, None]) * C + o_c[None, :]


@triton.jit
def centred(shift, total, squares, count):
    """Mean and sum of squared deviations from sums over x − shift.

    The shift is the mean of the first tile of `count` elements: the rest may lie anywhere, but then it is the spread
    that is large, so that no more than the number of tiles is lost to cancellation, in units of rounding.
    """
    mean = total / count
    m2 = squares - total * mean
    return shift + mean, tl.where(m2 < 0.0, 0.0, m2)  # a NaN stays


@triton.jit
def row_moments_kernel(
    p_x,  # [N·C, S]
    p_mean,  # [N·C, CHUNKS], out
    p_m2,  # [N·C, CHUNKS], out
    p_count,  # [N, CHUNKS], out: positions of each chunk
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    C,
    S,
    CHUNKS,
    TILES,  # per chunk
    BEFORE: tl.constexpr,
    SQUARES: tl.constexpr,  # False: only sums are wanted, which keep an infinity where moments would make it NaN
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides S: the compiler asks only for 16
    ACC: tl.constexpr,
):
    i_chunk = tl.program_id(0) % CHUNKS
    i_row = tl.program_id(0) // CHUNKS
    S = S // ALIGN * ALIGN  # the same number: a hint would not reach the masks
    base = i_row.to(tl.int64) * S
    o_c = i_row % C
    first = i_chunk * TILES * BLOCK
    count = tl.minimum(TILES * BLOCK, S - first).to(ACC)
    o_s = first + tl.arange(0, BLOCK)
    m_s = o_s < S
    b_x = tl.load(p_x + base + o_s, mask=m_s, other=0.0).to(ACC)  # [BLOCK]
    b_x = BEFORE(b_x, o_c, base, o_s, o_c < C, m_s, a0, a1, a2, a3, a4, a5)
    shift = tl.zeros([], ACC)
    if SQUARES:
        shift = tl.sum(tl.where(m_s, b_x, 0.0)) / tl.minimum(BLOCK, S - first).to(ACC)
    total = tl.where(m_s, b_x - shift, 0.0)
    squares = total * total
    for i_tile in range(1, TILES):
        o_s = first + i_tile * BLOCK + tl.arange(0, BLOCK)
        m_s = o_s < S
        b_x = tl.load(p_x + base + o_s, mask=m_s, other=0.0).to(ACC)
        b_x = BEFORE(b_x, o_c, base, o_s, o_c < C, m_s, a0, a1, a2, a3, a4, a5)
        b_x = tl.where(m_s, b_x - shift, 0.0)
        total += b_x
        squares += b_x * b_x
    if SQUARES:
        mean, m2 = centred(shift, tl.sum(total), tl.sum(squares), count)
        tl.store(p_mean + i_row * CHUNKS + i_chunk, mean)
        tl.store(p_m2 + i_row * CHUNKS + i_chunk, m2)
    else:
        tl.store(p_mean + i_row * CHUNKS + i_chunk, tl.sum(total))
    if o_c == 0:
        tl.store(p_count + i_row // C * CHUNKS + i_chunk, count)


@triton.jit
def last_moments_kernel(
    p_x,  # [N, S, C], or [N, C, S] where SHORT
    p_mean,  # [N, C, CHUNKS], out
    p_m2,  # [N, C, CHUNKS], out
    p_count,  # [N, CHUNKS], out: positions of each chunk
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    C,
    S,
    CHUNKS,
    TILES,
    BEFORE: tl.constexpr,
    SQUARES: tl.constexpr,  # False: only sums are wanted, which keep an infinity where moments would make it NaN
    BLOCK: tl.constexpr,  # rows of a tile
    BLOCK_C: tl.constexpr,
    SHORT: tl.constexpr,  # each row of [N, C, S] is one tile's
    ALIGN: tl.constexpr,  # where SHORT as in rows, otherwise 1
    WIDE: tl.constexpr,
    ACC: tl.constexpr,
):
    i_chunk = tl.program_id(0) % CHUNKS
    i_n = tl.program_id(0) // CHUNKS
    S = S // ALIGN * ALIGN
    base = i_n.to(tl.int64) * S * C
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    m_c = o_c < C
    first = i_chunk * TILES * BLOCK
    count = tl.minimum(TILES * BLOCK, S - first).to(ACC)
    o_s = first + tl.arange(0, BLOCK)
    o_x = places(o_s, o_c, C, S, SHORT, WIDE)  # [BLOCK, BLOCK_C]
    m_x = (o_s < S)[:, None] & m_c[None, :]
    b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
    b_x = BEFORE(b_x, o_c[None, :], base, o_x, m_c[None, :], m_x, a0, a1, a2, a3, a4, a5)
    shift = tl.zeros([BLOCK_C], ACC)
    if SQUARES:
        shift = tl.sum(tl.where(m_x, b_x, 0.0), axis=0) / tl.minimum(BLOCK, S - first).to(ACC)
    total = tl.where(m_x, b_x - shift[None, :], 0.0)
    squares = total * total
    for i_tile in range(1, TILES):
        o_s = first + i_tile * BLOCK + tl.arange(0, BLOCK)
        o_x = places(o_s, o_c, C, S, SHORT, WIDE)
        m_x = (o_s < S)[:, None] & m_c[None, :]
        b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
        b_x = BEFORE(b_x, o_c[None, :], base, o_x, m_c[None, :], m_x, a0, a1, a2, a3, a4, a5)
        b_x = tl.where(m_x, b_x - shift[None, :], 0.0)
        total += b_x
        squares += b_x * b_x
    o_out = (i_n * C + o_c) * CHUNKS + i_chunk
    if SQUARES:
        mean, m2 = centred(shift, tl.sum(total, axis=0), tl.sum(squares, axis=0), count)
        tl.store(p_mean + o_out, mean, mask=m_c)
        tl.store(p_m2 + o_out, m2, mask=m_c)
    else:
        tl.store(p_mean + o_out, tl.sum(total, axis=0), mask=m_c)
    if tl.program_id(1) == 0:
        tl.store(p_count + i_n * CHUNKS + i_chunk, count)


@triton.jit
def combine_moments_kernel(
    p_mean,  # [N·G, PARTS]: the partial moments of a group's channels, chunk by chunk
    p_m2,  # [N·G, PARTS]
    p_count,  # [N, CHUNKS]
    p_group_mean,  # [N·G], out
    p_group_rstd,  # [N·G], out
    GROUPS,
    PARTS,
    CHUNKS,
    count,  # positions of a whole group
    eps,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    i_group = tl.program_id(0)
    base = i_group.to(tl.int64) * PARTS
    p_count += i_group // GROUPS * CHUNKS
    o_part = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], ACC)
    for start in range(0, PARTS, BLOCK):
        o = start + o_part
        m = o < PARTS
        b_count = tl.load(p_count + o % CHUNKS, mask=m, other=0.0)  # [BLOCK]
        total += tl.load(p_mean + base + o, mask=m, other=0.0) * b_count
    mean = tl.sum(total) / count
    m2 = tl.zeros([BLOCK], ACC)
    for start in range(0, PARTS, BLOCK):
        o = start + o_part
        m = o < PARTS
        b_count = tl.load(p_count + o % CHUNKS, mask=m, other=0.0)
        b_mean = tl.load(p_mean + base + o, mask=m, other=0.0)
        b_m2 = tl.load(p_m2 + base + o, mask=m, other=0.0)
        m2 += tl.where(m, b_m2 + b_count * (b_mean - mean) * (b_mean - mean), 0.0)
    tl.store(p_group_mean + i_group, mean)
    tl.store(p_group_rstd + i_group, 1.0 / tl.sqrt(tl.sum(m2) / count + eps))


@triton.jit
def row_finish_kernel(
    p_x,  # [N·C, S]
    p_y,  # [N·C, S], out; may be p_x
    p_mean,  # [N·G]
    p_rstd,  # [N·G]
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    C,
    S,
    CHUNKS,
    PER_GROUP,  # channels of a group
    WHOLE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides S: the compiler asks only for 16
    ACC: tl.constexpr,
):
    i_chunk = tl.program_id(0) % CHUNKS
    i_row = tl.program_id(0) // CHUNKS
    S = S // ALIGN * ALIGN  # the same number: a hint would not reach the masks
    base = i_row.to(tl.int64) * S
    o_c = i_row % C
    o_s = i_chunk * BLOCK + tl.arange(0, BLOCK)
    m_s = o_s < S
    b_x = tl.load(p_x + base + o_s, mask=m_s, other=0.0).to(ACC)  # [BLOCK]
    mean = tl.zeros([], ACC)
    rstd = tl.zeros([], ACC)
    if HAS_NORM:
        mean = tl.load(p_mean + i_row // PER_GROUP)
        rstd = tl.load(p_rstd + i_row // PER_GROUP)
    b_y = WHOLE(b_x, mean, rstd, o_c, base, o_s, o_c < C, m_s, a0, a1, a2, a3, a4, a5)
    tl.store(p_y + base + o_s, b_y.to(p_y.dtype.element_ty), mask=m_s)


@triton.jit
def last_finish_kernel(
    p_x,  # [N, S, C], or [N, C, S] where SHORT
    p_y,  # as p_x, which it may be, or [N, C, S] where CONTIGUOUS_OUT, out
    p_mean,  # [N·G]
    p_rstd,  # [N·G]
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    C,
    S,
    CHUNKS,
    PER_GROUP,
    WHOLE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SHORT: tl.constexpr,  # each row of [N, C, S] is one tile's
    ALIGN: tl.constexpr,  # where SHORT as in rows, otherwise 1
    WIDE: tl.constexpr,
    CONTIGUOUS_OUT: tl.constexpr,  # PyTorch's norms may give up channels-last
    ACC: tl.constexpr,
):
    i_chunk = tl.program_id(0) % CHUNKS
    i_n = tl.program_id(0) // CHUNKS
    S = S // ALIGN * ALIGN
    base = i_n.to(tl.int64) * S * C
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    m_c = o_c < C
    o_s = i_chunk * BLOCK + tl.arange(0, BLOCK)
    o_x = places(o_s, o_c, C, S, SHORT, WIDE)  # [BLOCK, BLOCK_C]
    m_x = (o_s < S)[:, None] & m_c[None, :]
    b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
    mean = tl.zeros([1, BLOCK_C], ACC)
    rstd = tl.zeros([1, BLOCK_C], ACC)
    if HAS_NORM:
        o_g = (i_n * C + o_c) // PER_GROUP
        mean = tl.load(p_mean + o_g, mask=m_c, other=0.0)[None, :]
        rstd = tl.load(p_rstd + o_g, mask=m_c, other=0.0)[None, :]
    b_y = WHOLE(b_x, mean, rstd, o_c[None, :], base, o_x, m_c[None, :], m_x, a0, a1, a2, a3, a4, a5)
    if CONTIGUOUS_OUT:
        o_x = places(o_s, o_c, C, S, True, WIDE)
    tl.store(p_y + base + o_x, b_y.to(p_y.dtype.element_ty), mask=m_x)
