"""The last pass of a chain that ends in a reduction over channels: they all lie in one tile.

Names as in normalize.py, and NORM_STEPS_FN as there: all steps that are left before the reduction. It takes channels
along one axis: loaded along two, each number was loaded four times. Lanes past the last channel count for nothing.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.pointwise import exp
from postlude.kernels.triton.tiles import of_groups, own_channels, own_rows, own_tile


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
    p_x,  # [N, C, S], or [N, S, C] where IS_CHANNELS_LAST
    p_y,  # [N, S], out
    p_mean, p_rstd,  # [N·G]
    a0, a1, a2, a3, a4, a5,
    C, S, CHUNKS,
    C_PER_GROUP,
    NORM_STEPS_FN: tl.constexpr,
    OP: tl.constexpr,  # "logsumexp", "amax" or "amin"
    HAS_NORM: tl.constexpr,
    BLOCK_S: tl.constexpr,  # positions of a tile
    BLOCK_C: tl.constexpr,  # C or more
    IS_CHANNELS_LAST: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides S, or 1 where IS_CHANNELS_LAST
    USES_INT64: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    S = S // ALIGN * ALIGN  # the same number: a hint would not reach the masks
    i_chunk, i_n, o_c, m_c, base = own_channels(C, S, CHUNKS, BLOCK_C)
    o_x, m_x = own_tile(i_chunk * BLOCK_S, o_c, m_c, C, S, BLOCK_S, BLOCK_C, not IS_CHANNELS_LAST, USES_INT64)
    b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)  # [BLOCK_S, BLOCK_C]
    o_g = own_rows(i_n, o_c, C, BLOCK_C) // C_PER_GROUP
    mean, rstd = of_groups(p_mean, p_rstd, o_g, m_c, HAS_NORM, ACC)
    b_x = NORM_STEPS_FN(b_x, mean, rstd, o_c, base, o_x, m_c, m_x, a0, a1, a2, a3, a4, a5)
    if OP == "amin":
        b_x = -b_x
    b_x = tl.where(m_c[None, :], b_x, float("-inf"))
    if OP == "logsumexp":
        b_y = row_logsumexp(b_x)
    elif OP == "amax":
        b_y = row_largest(b_x)
    else:
        b_y = -row_largest(b_x)
    o_s = i_chunk * BLOCK_S + tl.arange(0, BLOCK_S)  # [BLOCK_S]
    tl.store(p_y + i_n.to(tl.int64) * S + o_s, b_y.to(p_y.dtype.element_ty), mask=o_s < S)
