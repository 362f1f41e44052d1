"""The passes of a norm over a value that is in memory: moments, their combination, normalise with the tail.

Names: i_ program index, o_ offsets, p_ pointer, m_ mask, b_ block value. A value is seen as rows:

    contiguous      [N·C, S]: one row per sample and channel, and the row's channel is one number
    channels-last   [N, S, C]: rows of channels, tiles of BLOCK rows and BLOCK_C channels

Where a row or a sample begins is one 64-bit number; offsets from there are 32-bit unless a sample needs more (WIDE).

BEFORE and WHOLE are composed functions (see emit.py): the steps before the norm, and all steps with the norm among
them. Each is one jit function: a tuple of functions would be cached by their names only.
"""

import triton
import triton.language as tl


@triton.jit
def merge(count, mean, m2, b_count, b_mean, b_m2):
    """Chan's formula: moments of two sets from the moments of each."""
    total = count + b_count
    delta = b_mean - mean
    weight = b_count / total
    return total, mean + delta * weight, m2 + b_m2 + delta * delta * count * weight


@triton.jit
def row_moments_kernel(
    p_x,  # [N·C, S]
    p_mean,  # [N·C, CHUNKS], out
    p_m2,  # [N·C, CHUNKS], out
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
    ACC: tl.constexpr,
):
    i_chunk = tl.program_id(0) % CHUNKS
    i_row = tl.program_id(0) // CHUNKS
    base = i_row.to(tl.int64) * S
    o_c = i_row % C
    count = tl.zeros([], ACC)
    mean = tl.zeros([], ACC)
    m2 = tl.zeros([], ACC)
    for i_tile in range(TILES):
        o_s = (i_chunk * TILES + i_tile) * BLOCK + tl.arange(0, BLOCK)
        m_s = o_s < S
        b_x = tl.load(p_x + base + o_s, mask=m_s, other=0.0).to(ACC)  # [BLOCK]
        b_x = BEFORE(b_x, o_c, base, o_s, o_c < C, m_s, a0, a1, a2, a3, a4, a5)
        b_count = tl.sum(m_s.to(ACC))
        b_mean = tl.sum(tl.where(m_s, b_x, 0.0)) / tl.maximum(b_count, 1.0)
        b_diff = tl.where(m_s, b_x - b_mean, 0.0)
        b_m2 = tl.sum(b_diff * b_diff)
        if SQUARES:
            if b_count > 0:
                count, mean, m2 = merge(count, mean, m2, b_count, b_mean, b_m2)
        else:
            mean += b_mean * b_count
    tl.store(p_mean + i_row * CHUNKS + i_chunk, mean)
    tl.store(p_m2 + i_row * CHUNKS + i_chunk, m2)


@triton.jit
def last_moments_kernel(
    p_x,  # [N, S, C]
    p_mean,  # [N, C, CHUNKS], out
    p_m2,  # [N, C, CHUNKS], out
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
    WIDE: tl.constexpr,
    ACC: tl.constexpr,
):
    i_chunk = tl.program_id(0) % CHUNKS
    i_n = tl.program_id(0) // CHUNKS
    base = i_n.to(tl.int64) * S * C
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    m_c = o_c < C
    count = tl.zeros([], ACC)
    mean = tl.zeros([BLOCK_C], ACC)
    m2 = tl.zeros([BLOCK_C], ACC)
    for i_tile in range(TILES):
        o_s = (i_chunk * TILES + i_tile) * BLOCK + tl.arange(0, BLOCK)
        m_s = o_s < S
        o_x = (o_s[:, None].to(tl.int64) if WIDE else o_s[:, None]) * C + o_c[None, :]  # [BLOCK, BLOCK_C]
        m_x = m_s[:, None] & m_c[None, :]
        b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
        b_x = BEFORE(b_x, o_c[None, :], base, o_x, m_c[None, :], m_x, a0, a1, a2, a3, a4, a5)
        b_count = tl.sum(m_s.to(ACC))
        b_mean = tl.sum(tl.where(m_x, b_x, 0.0), axis=0) / tl.maximum(b_count, 1.0)  # [BLOCK_C]
        b_diff = tl.where(m_x, b_x - b_mean[None, :], 0.0)
        b_m2 = tl.sum(b_diff * b_diff, axis=0)
        if SQUARES:
            if b_count > 0:
                count, mean, m2 = merge(count, mean, m2, b_count, b_mean, b_m2)
        else:
            mean += b_mean * b_count
    o_out = (i_n * C + o_c) * CHUNKS + i_chunk
    tl.store(p_mean + o_out, mean, mask=m_c)
    tl.store(p_m2 + o_out, m2, mask=m_c)


@triton.jit
def combine_moments_kernel(
    p_mean,  # [N·G, PARTS]: the partial moments of a group's channels, chunk by chunk
    p_m2,  # [N·G, PARTS]
    p_group_mean,  # [N·G], out
    p_group_rstd,  # [N·G], out
    PARTS,
    CHUNKS,
    CHUNK,  # positions in every chunk but a channel's last
    S,
    count,  # positions of a whole group
    eps,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    i_group = tl.program_id(0)
    o_part = tl.arange(0, BLOCK)
    total = tl.zeros([], ACC)
    for start in range(0, PARTS, BLOCK):
        o = start + o_part
        m = o < PARTS
        b_count = tl.where(m, tl.minimum(CHUNK, S - (o % CHUNKS) * CHUNK), 0).to(ACC)  # [BLOCK]
        total += tl.sum(tl.load(p_mean + i_group * PARTS + o, mask=m, other=0.0) * b_count)
    mean = total / count
    m2 = tl.zeros([], ACC)
    for start in range(0, PARTS, BLOCK):
        o = start + o_part
        m = o < PARTS
        b_count = tl.where(m, tl.minimum(CHUNK, S - (o % CHUNKS) * CHUNK), 0).to(ACC)
        b_mean = tl.load(p_mean + i_group * PARTS + o, mask=m, other=0.0)
        b_m2 = tl.load(p_m2 + i_group * PARTS + o, mask=m, other=0.0)
        m2 += tl.sum(tl.where(m, b_m2 + b_count * (b_mean - mean) * (b_mean - mean), 0.0))
    tl.store(p_group_mean + i_group, mean)
    tl.store(p_group_rstd + i_group, 1.0 / tl.sqrt(m2 / count + eps))


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
    ACC: tl.constexpr,
):
    i_chunk = tl.program_id(0) % CHUNKS
    i_row = tl.program_id(0) // CHUNKS
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
    p_x,  # [N, S, C]
    p_y,  # [N, S, C], or [N, C, S] where CONTIGUOUS_OUT, out; may be p_x in the first case
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
    WIDE: tl.constexpr,
    CONTIGUOUS_OUT: tl.constexpr,  # PyTorch's norms may give up channels-last
    ACC: tl.constexpr,
):
    i_chunk = tl.program_id(0) % CHUNKS
    i_n = tl.program_id(0) // CHUNKS
    base = i_n.to(tl.int64) * S * C
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    m_c = o_c < C
    o_s = i_chunk * BLOCK + tl.arange(0, BLOCK)
    o_x = (o_s[:, None].to(tl.int64) if WIDE else o_s[:, None]) * C + o_c[None, :]  # [BLOCK, BLOCK_C]
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
        o_x = (o_c[None, :].to(tl.int64) if WIDE else o_c[None, :]) * S + o_s[:, None]
    tl.store(p_y + base + o_x, b_y.to(p_y.dtype.element_ty), mask=m_x)
