"""The passes of a norm over a value in memory: moments, their combination, and normalising with all other steps.

tiles.py has the layouts of a value; each pass is one kernel for all of them.

STEPS_FN and NORM_STEPS_FN are composed functions (see steps.py): the steps before the norm, and all steps including the
norm. Each is one jit function, because Triton would cache a tuple of functions by their names only.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.tiles import (
    beside,
    has_first,
    of_groups,
    own_channels,
    own_rows,
    own_sample,
    own_tile,
    places,
)


@triton.jit
def centred(shift, total, squares, count):
    """Mean and sum of squared deviations (M2), from sums of x − shift and of its square.

    The shift is the mean of the first tile. The other values may lie far from it, but then M2 is large as well: the
    cancellation amplifies rounding by at most the number of tiles.
    """
    mean = total / count
    m2 = squares - total * mean
    return shift + mean, tl.where(m2 < 0.0, 0.0, m2)  # not tl.maximum, which drops a NaN


@triton.jit
def moments_kernel(
    p_x,  # [N, C, S] in the value's layout
    p_mean, p_m2,  # [N, C, CHUNKS], out
    p_count,  # [N, CHUNKS], out: positions of each chunk
    a0, a1, a2, a3, a4, a5,
    C, S, CHUNKS,
    TILES_PER_PROGRAM,  # of a chunk
    STEPS_FN: tl.constexpr,
    HAS_M2: tl.constexpr,  # False: only sums are needed; a sum keeps an infinity, moments would turn it into NaN
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, HAS_SHORT_ROWS: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides S: Triton itself checks only for 16
    USES_INT64: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    S = S // ALIGN * ALIGN  # same value; shows the compiler that ALIGN divides it, also in masks
    i_chunk, i_row, o_c, m_c, base = own_channels(C, S, CHUNKS, BLOCK_C)
    first = i_chunk * TILES_PER_PROGRAM * BLOCK_S
    count = tl.minimum(TILES_PER_PROGRAM * BLOCK_S, S - first).to(ACC)
    o_x, m_x = own_tile(first, o_c, m_c, C, S, BLOCK_S, BLOCK_C, HAS_SHORT_ROWS, USES_INT64)
    b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
    b_x = STEPS_FN(b_x, beside(o_c, BLOCK_C), base, o_x, beside(m_c, BLOCK_C), m_x, a0, a1, a2, a3, a4, a5)
    shift = 0.0
    if HAS_M2:
        shift = tl.sum(tl.where(m_x, b_x, 0.0), axis=0) / tl.minimum(BLOCK_S, S - first).to(ACC)
    total = tl.where(m_x, b_x - shift, 0.0)
    squares = total * total
    for i_tile in range(1, TILES_PER_PROGRAM):
        o_x, m_x = own_tile(first + i_tile * BLOCK_S, o_c, m_c, C, S, BLOCK_S, BLOCK_C, HAS_SHORT_ROWS, USES_INT64)
        b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
        b_x = STEPS_FN(b_x, beside(o_c, BLOCK_C), base, o_x, beside(m_c, BLOCK_C), m_x, a0, a1, a2, a3, a4, a5)
        b_x = tl.where(m_x, b_x - shift, 0.0)
        total += b_x
        squares += b_x * b_x
    o_out = own_rows(i_row, o_c, C, BLOCK_C) * CHUNKS + i_chunk
    if HAS_M2:
        mean, m2 = centred(shift, tl.sum(total, axis=0), tl.sum(squares, axis=0), count)
        tl.store(p_mean + o_out, mean, mask=m_c)
        tl.store(p_m2 + o_out, m2, mask=m_c)
    else:
        tl.store(p_mean + o_out, tl.sum(total, axis=0), mask=m_c)
    if has_first(o_c, BLOCK_C):
        tl.store(p_count + own_sample(i_row, C, BLOCK_C) * CHUNKS + i_chunk, count)


@triton.jit
def part_at(o, CHUNKS, SAMPLE_STRIDE, IS_OVER_BATCH: tl.constexpr):
    """The offset of part o. A group's parts are consecutive; a batch's are SAMPLE_STRIDE apart from sample to
    sample."""
    return o // CHUNKS * SAMPLE_STRIDE + o % CHUNKS if IS_OVER_BATCH else o


@triton.jit
def count_at(o, CHUNKS, IS_OVER_BATCH: tl.constexpr):
    return o if IS_OVER_BATCH else o % CHUNKS


@triton.jit
def combined_parts(
    p_mean, p_m2, p_count, PARTS, CHUNKS, SAMPLE_STRIDE, count,
    IS_OVER_BATCH: tl.constexpr, BLOCK_PARTS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Mean and M2 from PARTS partial moments: of a group's channels, or of one channel over the batch.

    The mean is the first part's plus what the others differ from it: a sum of all would lose digits where the mean is
    large against the spread, to the same side in every group.
    """
    total = tl.zeros([BLOCK_PARTS], ACC)
    first = tl.load(p_mean)
    for start in range(0, PARTS, BLOCK_PARTS):
        o = start + tl.arange(0, BLOCK_PARTS)
        m = o < PARTS
        b_count = tl.load(p_count + count_at(o, CHUNKS, IS_OVER_BATCH), mask=m, other=0.0)  # [BLOCK_PARTS]
        b_mean = tl.load(p_mean + part_at(o, CHUNKS, SAMPLE_STRIDE, IS_OVER_BATCH), mask=m, other=0.0)
        total += (b_mean - first) * b_count
    mean = first + tl.sum(total) / count
    m2 = tl.zeros([BLOCK_PARTS], ACC)
    for start in range(0, PARTS, BLOCK_PARTS):
        o = start + tl.arange(0, BLOCK_PARTS)
        m = o < PARTS
        b_count = tl.load(p_count + count_at(o, CHUNKS, IS_OVER_BATCH), mask=m, other=0.0)
        b_mean = tl.load(p_mean + part_at(o, CHUNKS, SAMPLE_STRIDE, IS_OVER_BATCH), mask=m, other=0.0)
        b_m2 = tl.load(p_m2 + part_at(o, CHUNKS, SAMPLE_STRIDE, IS_OVER_BATCH), mask=m, other=0.0)
        m2 += tl.where(m, b_m2 + b_count * (b_mean - mean) * (b_mean - mean), 0.0)
    return mean, tl.sum(m2)


@triton.jit
def combine_moments_kernel(
    p_mean,  # [N·G, PARTS]: the partial moments of a group's channels, chunk by chunk
    p_m2,  # [N·G, PARTS]
    p_count,  # [N, CHUNKS]
    p_group_mean, p_group_rstd,  # [N·G], out
    GROUPS, PARTS, CHUNKS,
    count,  # positions of a whole group
    eps,
    BLOCK_PARTS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    i_group = tl.program_id(0)
    base = i_group.to(tl.int64) * PARTS
    p_count += i_group // GROUPS * CHUNKS
    mean, m2 = combined_parts(
        p_mean + base, p_m2 + base, p_count, PARTS, CHUNKS, CHUNKS, count, False, BLOCK_PARTS, ACC
    )
    tl.store(p_group_mean + i_group, mean)
    tl.store(p_group_rstd + i_group, 1.0 / tl.sqrt(m2 / count + eps))


@triton.jit
def finish_kernel(
    p_x,  # [N, C, S] in the value's layout
    p_y,  # as p_x, which it may be, or [N, C, S] where IS_OUT_CONTIGUOUS, out
    p_mean, p_rstd,  # [N·G]
    a0, a1, a2, a3, a4, a5,
    C, S, CHUNKS,
    C_PER_GROUP,
    NORM_STEPS_FN: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, HAS_SHORT_ROWS: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides S: Triton itself checks only for 16
    USES_INT64: tl.constexpr,
    IS_OUT_CONTIGUOUS: tl.constexpr,  # some of PyTorch's norms return a contiguous result for a channels-last input
    ACC: tl.constexpr,
):  # fmt: skip
    S = S // ALIGN * ALIGN  # same value; shows the compiler that ALIGN divides it, also in masks
    i_chunk, i_row, o_c, m_c, base = own_channels(C, S, CHUNKS, BLOCK_C)
    o_x, m_x = own_tile(i_chunk * BLOCK_S, o_c, m_c, C, S, BLOCK_S, BLOCK_C, HAS_SHORT_ROWS, USES_INT64)
    b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
    o_g = own_rows(i_row, o_c, C, BLOCK_C) // C_PER_GROUP
    mean, rstd = of_groups(p_mean, p_rstd, o_g, m_c, HAS_NORM, ACC)
    b_y = NORM_STEPS_FN(
        b_x, mean, rstd, beside(o_c, BLOCK_C), base, o_x, beside(m_c, BLOCK_C), m_x, a0, a1, a2, a3, a4, a5
    )
    if IS_OUT_CONTIGUOUS:
        o_x = places(i_chunk * BLOCK_S + tl.arange(0, BLOCK_S), o_c, C, S, True, USES_INT64)
    tl.store(p_y + base + o_x, b_y.to(p_y.dtype.element_ty), mask=m_x)
