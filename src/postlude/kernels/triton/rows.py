"""layer_norm: a row of the last axes lies inside one tile, so that one pass over a value does everything.

Names are as in normalize.py. A contiguous value is seen as rows of L elements, R of them for each sample and channel; a
tile has BLOCK_R rows. Where a row is a whole sample, its channels lie one after the other inside it (SAMPLE).
"""

import triton
import triton.language as tl


@triton.jit
def row_mean(x, m_x, L):
    return tl.sum(tl.where(m_x, x, 0.0), axis=1)[:, None] / L.to(x.dtype)  # [BLOCK_R, 1]


@triton.jit
def row_statistics(x, m_x, L, eps):
    mean = row_mean(x, m_x, L)
    centred = x - mean
    return mean, 1.0 / tl.sqrt(row_mean(centred * centred, m_x, L) + eps)


@triton.jit
def rows_kernel(
    p_x,  # [ROWS, L]
    p_y,  # [ROWS, L], out; may be p_x
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    C,
    R,  # rows of a sample's channel
    L,
    ROWS,
    STEPS: tl.constexpr,  # all steps, as one composed function (see emit.py)
    SAMPLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides L: the compiler asks only for 16
    ACC: tl.constexpr,
):
    L = L // ALIGN * ALIGN  # the same number: a hint would not reach the masks
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    o_r = tl.arange(0, BLOCK_R)
    o_l = tl.arange(0, BLOCK_L)[None, :]
    o_x = o_r[:, None] * L + o_l  # [BLOCK_R, BLOCK_L]
    m_x = (first + o_r < ROWS)[:, None] & (o_l < L)
    o_c = o_l // (L // C) if SAMPLE else ((first + o_r) // R % C)[:, None]
    b_x = tl.load(p_x + first * L + o_x, mask=m_x, other=0.0).to(ACC)
    b_y = STEPS(b_x, o_l, L, o_c, first * L, o_x, o_c < C, m_x, a0, a1, a2, a3, a4, a5)
    tl.store(p_y + first * L + o_x, b_y.to(p_y.dtype.element_ty), mask=m_x)
