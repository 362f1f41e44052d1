"""Sums of a matrix by column, and the product of each row of another matrix with them.

The sum of a linear layer's features needs no more than this: Σ_f Σ_k x[n, k] w[f, k] = Σ_k x[n, k] · (Σ_f w[f, k]).
The weight is read once, for its sums and for its least and largest entries, which say where PyTorch's sum is NaN.
"""

import triton
import triton.language as tl


@triton.jit
def column_sums_kernel(
    p_x,  # [ROWS, L]
    p_factor,  # [ROWS], float64, where HAS_FACTORS: what each row is multiplied by
    p_sum,  # [CHUNKS, L], out; means where not IS_SUM
    p_min, p_max,  # [CHUNKS, L], out, where HAS_EXTREMES; NaN are not among them
    ROWS, L,
    ROWS_PER_PROGRAM,  # one chunk; a multiple of BLOCK_ROWS, unless it is less
    IS_SUM: tl.constexpr, HAS_FACTORS: tl.constexpr, HAS_EXTREMES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    i_chunk = tl.program_id(0)
    first = i_chunk * ROWS_PER_PROGRAM
    end = tl.minimum(first + ROWS_PER_PROGRAM, ROWS)
    o_l = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    # Whole tiles are added up, and their rows only at the end: a sum over rows needs shared memory.
    b_sum = tl.zeros([BLOCK_ROWS, BLOCK_L], ACC)
    b_min = tl.full([BLOCK_ROWS, BLOCK_L], float("inf"), ACC)
    b_max = tl.full([BLOCK_ROWS, BLOCK_L], float("-inf"), ACC)
    for row in range(first, end, BLOCK_ROWS):
        o_r = row + tl.arange(0, BLOCK_ROWS)
        m_x = (o_r < end)[:, None] & (o_l < L)[None, :]
        b_x = tl.load(p_x + o_r[:, None].to(tl.int64) * L + o_l[None, :], mask=m_x, other=0.0).to(ACC)
        if HAS_FACTORS:
            b_x *= tl.load(p_factor + o_r, mask=o_r < end, other=0.0)[:, None]
        b_sum += b_x
        if HAS_EXTREMES:
            b_min = tl.minimum(b_min, tl.where(m_x, b_x, float("inf")))
            b_max = tl.maximum(b_max, tl.where(m_x, b_x, float("-inf")))
    o_y = i_chunk.to(tl.int64) * L + o_l
    total = tl.sum(b_sum.to(tl.float64), axis=0)  # [BLOCK_L]
    if not IS_SUM:
        total /= end - first
    tl.store(p_sum + o_y, total.to(p_sum.dtype.element_ty), mask=o_l < L)
    if HAS_EXTREMES:
        tl.store(p_min + o_y, tl.min(b_min, axis=0), mask=o_l < L)
        tl.store(p_max + o_y, tl.max(b_max, axis=0), mask=o_l < L)


@triton.jit
def sums_product_kernel(
    p_x,  # [ROWS, L]
    p_sum, p_min, p_max,  # [CHUNKS, L]
    p_y,  # [ROWS], float64, out
    ROWS, L, CHUNKS,
    BLOCK_ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """The product of each row with the sums of all chunks, in float64.

    Where that is not finite, PyTorch adds features that are infinities of either sign. Products with the least and the
    largest weight tell which: they differ in sign, and their sum is NaN, exactly if the features do.
    """
    o_r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m_r = o_r < ROWS
    total = tl.zeros([BLOCK_ROWS], tl.float64)
    extremes = tl.zeros([BLOCK_ROWS], tl.float64)
    for start in range(0, L, BLOCK_L):
        o_l = start + tl.arange(0, BLOCK_L)
        m_l = o_l < L
        b_sum = tl.zeros([BLOCK_L], tl.float64)
        b_min = tl.full([BLOCK_L], float("inf"), tl.float64)
        b_max = tl.full([BLOCK_L], float("-inf"), tl.float64)
        for i_chunk in range(CHUNKS):
            o_v = i_chunk * L + o_l
            b_sum += tl.load(p_sum + o_v, mask=m_l, other=0.0)
            b_min = tl.minimum(b_min, tl.load(p_min + o_v, mask=m_l, other=0.0).to(tl.float64))
            b_max = tl.maximum(b_max, tl.load(p_max + o_v, mask=m_l, other=0.0).to(tl.float64))
        b_min = tl.where(b_sum == b_sum, b_min, b_sum)  # a column with NaN
        o_x = o_r[:, None].to(tl.int64) * L + o_l[None, :]
        b_x = tl.load(p_x + o_x, mask=m_r[:, None] & m_l[None, :], other=0.0).to(tl.float64)
        total += tl.sum(b_x * b_sum[None, :], axis=1)
        extremes += tl.sum(b_x * b_min[None, :] + b_x * b_max[None, :], axis=1)
    tl.store(p_y + o_r, tl.where(tl.abs(total) < float("inf"), total, extremes), mask=m_r)
