"""The last pass of a chain that ends in a reduction over channels: they all lie in one tile.

Names as in normalize.py, and WHOLE as there: all steps that are left before the reduction. It takes channels along one
axis: loaded along two, each number was loaded four times. Lanes past the last channel count for nothing.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.normalize import places
from postlude.kernels.triton.pointwise import exp


@triton.jit
def row_largest(b_x):
    """Of each row; a NaN stays, which `tl.max` would lose."""
    nan = tl.sum(tl.where(b_x <= float("inf"), 0.0, b_x), axis=1)
    return tl.max(b_x, axis=1) + nan


@triton.jit
def row_logsumexp(b_x):
    """log(Σ exp(x)) of each row without an overflow; of infinities and NaN as PyTorch has it."""
    shift = tl.max(b_x, axis=1)
    shift = tl.where(tl.abs(shift) == float("inf"), 0.0, shift)  # ∞ − ∞ would be NaN
    return tl.log(tl.sum(exp(b_x - shift[:, None]), axis=1)) + shift


@triton.jit
def channels_kernel(
    p_x,  # [N, C, S], or [N, S, C] where LAST
    p_y,  # [N, S], out
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
    OP: tl.constexpr,  # "logsumexp", "amax" or "amin"
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,  # positions of a tile
    BLOCK_C: tl.constexpr,  # C or more
    LAST: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides S, or 1 where LAST
    WIDE: tl.constexpr,
    ACC: tl.constexpr,
):
    i_chunk = tl.program_id(0) % CHUNKS
    i_n = tl.program_id(0) // CHUNKS
    S = S // ALIGN * ALIGN  # the same number: a hint would not reach the masks
    base = i_n.to(tl.int64) * S * C
    o_c = tl.arange(0, BLOCK_C)  # [BLOCK_C]
    m_c = o_c < C
    o_s = i_chunk * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    o_x = places(o_s, o_c, C, S, not LAST, WIDE)  # [BLOCK, BLOCK_C]
    m_x = (o_s < S)[:, None] & m_c[None, :]
    b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
    mean = tl.zeros([1, BLOCK_C], ACC)
    rstd = tl.zeros([1, BLOCK_C], ACC)
    if HAS_NORM:
        o_g = (i_n * C + o_c) // PER_GROUP
        mean = tl.load(p_mean + o_g, mask=m_c, other=0.0)[None, :]
        rstd = tl.load(p_rstd + o_g, mask=m_c, other=0.0)[None, :]
    b_x = WHOLE(b_x, mean, rstd, o_c, base, o_x, m_c, m_x, a0, a1, a2, a3, a4, a5)
    if OP == "amin":
        b_x = -b_x
    b_x = tl.where(m_c[None, :], b_x, float("-inf"))
    if OP == "logsumexp":
        b_y = row_logsumexp(b_x)
    elif OP == "amax":
        b_y = row_largest(b_x)
    else:
        b_y = -row_largest(b_x)
    tl.store(p_y + i_n.to(tl.int64) * S + o_s, b_y.to(p_y.dtype.element_ty), mask=o_s < S)
