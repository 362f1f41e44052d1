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
    ROWS_PER_PROGRAM,  # one chunk
    IS_SUM: tl.constexpr, HAS_FACTORS: tl.constexpr, HAS_EXTREMES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    BLOCKS = tl.cdiv(L, BLOCK_L)  # neighbours read the same rows
    i_chunk = tl.program_id(0) // BLOCKS
    first = i_chunk * ROWS_PER_PROGRAM
    end = tl.minimum(first + ROWS_PER_PROGRAM, ROWS)
    o_l = tl.program_id(0) % BLOCKS * BLOCK_L + tl.arange(0, BLOCK_L)
    b_sum = tl.zeros([BLOCK_L], tl.float64)
    b_min = tl.full([BLOCK_L], float("inf"), ACC)
    b_max = tl.full([BLOCK_L], float("-inf"), ACC)
    # Without stages ptxas keeps two or three loads of a thread in flight, which is half of the card's bandwidth.
    for row in tl.range(first, end, BLOCK_ROWS, num_stages=3):
        o_r = row + tl.arange(0, BLOCK_ROWS)
        m_x = (o_r < end)[:, None] & (o_l < L)[None, :]
        b_x = tl.load(p_x + o_r[:, None].to(tl.int64) * L + o_l[None, :], mask=m_x, other=0.0).to(ACC)
        if HAS_FACTORS:
            b_x *= tl.load(p_factor + o_r, mask=o_r < end, other=0.0)[:, None]
        b_sum += tl.sum(b_x, axis=0).to(tl.float64)
        if HAS_EXTREMES:
            b_min = tl.minimum(b_min, tl.min(tl.where(m_x, b_x, float("inf")), axis=0))
            b_max = tl.maximum(b_max, tl.max(tl.where(m_x, b_x, float("-inf")), axis=0))
    o_y = i_chunk.to(tl.int64) * L + o_l
    if not IS_SUM:
        b_sum /= end - first
    tl.store(p_sum + o_y, b_sum.to(p_sum.dtype.element_ty), mask=o_l < L)
    if HAS_EXTREMES:
        tl.store(p_min + o_y, b_min, mask=o_l < L)
        tl.store(p_max + o_y, b_max, mask=o_l < L)


@triton.jit
def sums_product_kernel(
    p_x,  # [ROWS, L]
    p_sum,  # [L], float64
    p_min, p_max,  # [CHUNKS, L]
    p_y,  # [ROWS], float64, out
    ROWS, L, CHUNKS,
    BLOCK_ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """The product of each row with the sums, in float64.

    Where that is not finite, PyTorch adds features that are infinities of either sign. Products with the least and the
    largest weight tell which: they differ in sign, and their sum is NaN, exactly if the features do.
    """
    o_r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m_r = o_r < ROWS
    b_y = tl.zeros([BLOCK_ROWS, BLOCK_L], tl.float64)  # added up along a row only at the end
    for start in tl.range(0, L, BLOCK_L, num_stages=3):
        o_l = start + tl.arange(0, BLOCK_L)
        o_x = o_r[:, None].to(tl.int64) * L + o_l[None, :]
        b_x = tl.load(p_x + o_x, mask=m_r[:, None] & (o_l < L)[None, :], other=0.0).to(tl.float64)
        b_y += b_x * tl.load(p_sum + o_l, mask=o_l < L, other=0.0)[None, :]
    total = tl.sum(b_y, axis=1)  # [BLOCK_ROWS]
    if tl.max(tl.where(tl.abs(total) < float("inf"), 0, 1)) > 0:
        extremes = tl.zeros([BLOCK_ROWS], tl.float64)
        for start in range(0, L, BLOCK_L):
            o_l = start + tl.arange(0, BLOCK_L)
            m_l = o_l < L
            b_min = tl.full([BLOCK_L], float("inf"), tl.float64)
            b_max = tl.full([BLOCK_L], float("-inf"), tl.float64)
            for i_chunk in range(CHUNKS):
                b_min = tl.minimum(b_min, tl.load(p_min + i_chunk * L + o_l, mask=m_l, other=0.0).to(tl.float64))
                b_max = tl.maximum(b_max, tl.load(p_max + i_chunk * L + o_l, mask=m_l, other=0.0).to(tl.float64))
            b_sum = tl.load(p_sum + o_l, mask=m_l, other=0.0)
            b_min = tl.where(b_sum == b_sum, b_min, b_sum)  # a column with NaN
            o_x = o_r[:, None].to(tl.int64) * L + o_l[None, :]
            b_x = tl.load(p_x + o_x, mask=m_r[:, None] & m_l[None, :], other=0.0).to(tl.float64)
            extremes += tl.sum(b_x * b_min[None, :] + b_x * b_max[None, :], axis=1)
        total = tl.where(tl.abs(total) < float("inf"), total, extremes)
    tl.store(p_y + o_r, total, mask=m_r)
