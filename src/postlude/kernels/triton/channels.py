"""The last pass of a chain with a softmax or a reduction over channels. A tile holds all channels of its positions.

Names are as in normalize.py. NORM_STEPS_FN is the steps before the reduction, or all steps that are left, softmaxes
among them. A tile has one axis for channels: with two, each number was loaded four times. Lanes past the last channel
are masked out of every result.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.pointwise import exp, quotient
from postlude.kernels.triton.tiles import of_groups, own_channels, own_rows, own_tile, places


@triton.jit
def row_largest(b_x):
    """The largest of each row. Keeps a NaN, which `tl.max` would drop."""
    nan = tl.sum(tl.where(b_x <= float("inf"), 0.0, b_x), axis=1)
    return tl.max(b_x, axis=1) + nan


@triton.jit
def row_place(b_x, largest, o_c):
    """The first channel that holds its row's largest; a NaN is larger than all others. o_c is [1, BLOCK_C]."""
    place = tl.where(b_x == largest[:, None], o_c, 1 << 30)
    return tl.min(tl.where(b_x <= float("inf"), place, o_c), axis=1)


@triton.jit
def row_logsumexp(b_x):
    """log(Σ exp(x)) of each row without overflow. Infinities and NaN give what PyTorch gives."""
    shift = tl.max(b_x, axis=1)
    shift = tl.where(tl.abs(shift) == float("inf"), 0.0, shift)  # ∞ − ∞ would be NaN
    return tl.log(tl.sum(exp(b_x - shift[:, None]), axis=1)) + shift


@triton.jit
def channel_softmax(b_x, m_c):
    """exp(x) / Σ exp(x) of each row [BLOCK_C]. A row with an infinity becomes NaN, as in PyTorch."""
    b_e = tl.where(m_c[None, :], exp(b_x - row_shift(b_x, m_c)), 0.0)
    return b_e * quotient(1.0, tl.sum(b_e, axis=1))[:, None]


@triton.jit
def channel_log_softmax(b_x, m_c):
    b_x = b_x - row_shift(b_x, m_c)
    return b_x - tl.log(tl.sum(tl.where(m_c[None, :], exp(b_x), 0.0), axis=1))[:, None]


@triton.jit
def channel_normalize(b_x, m_c, eps):
    """x / max(‖x‖, eps) of each row [BLOCK_C]; a length that is NaN stays."""
    b_x = tl.where(m_c[None, :], b_x, 0.0)
    length = tl.sqrt(tl.sum(b_x * b_x, axis=1))
    length = tl.where(length < eps, eps, length)
    return b_x / length[:, None]


@triton.jit
def row_shift(b_x, m_c):
    return tl.max(tl.where(m_c[None, :], b_x, float("-inf")), axis=1)[:, None]


@triton.jit
def channels_kernel(
    p_x,  # [N, C, S], or [N, S, C] where IS_CHANNELS_LAST
    p_y,  # [N, S], or where OP is "none" as p_x, which it may be, or [N, C, S] where IS_OUT_CONTIGUOUS, out
    p_reduced,  # [N, S], out where HAS_REDUCED: what the reduction gives, before the steps after it
    p_taps,  # [N, S], out where HAS_TAPS: the channel of the largest or smallest, of equal ones the first
    p_mean, p_rstd,  # [N·G]
    a0, a1, a2, a3, a4, a5,
    C, S, CHUNKS,
    C_PER_GROUP,
    NORM_STEPS_FN: tl.constexpr,
    AFTER_FN: tl.constexpr,  # the steps after the reduction
    OP: tl.constexpr,  # "logsumexp", "amax", "amin", "sum", "mean", or "none"
    HAS_REDUCED: tl.constexpr, HAS_TAPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_S: tl.constexpr,  # positions of a tile
    BLOCK_C: tl.constexpr,  # at least C
    IS_CHANNELS_LAST: tl.constexpr, IS_OUT_CONTIGUOUS: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides S, or 1 where IS_CHANNELS_LAST
    USES_INT64: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    S = S // ALIGN * ALIGN  # same value; shows the compiler that ALIGN divides it, also in masks
    i_chunk, i_n, o_c, m_c, base = own_channels(C, S, CHUNKS, BLOCK_C)
    o_x, m_x = own_tile(i_chunk * BLOCK_S, o_c, m_c, C, S, BLOCK_S, BLOCK_C, not IS_CHANNELS_LAST, USES_INT64)
    b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)  # [BLOCK_S, BLOCK_C]
    o_g = own_rows(i_n, o_c, C, BLOCK_C) // C_PER_GROUP
    mean, rstd = of_groups(p_mean, p_rstd, o_g, m_c, HAS_NORM, ACC)
    b_x = NORM_STEPS_FN(b_x, mean, rstd, o_c, base, o_x, m_c, m_x, a0, a1, a2, a3, a4, a5)
    o_s = i_chunk * BLOCK_S + tl.arange(0, BLOCK_S)  # [BLOCK_S]
    if OP == "none":
        if IS_OUT_CONTIGUOUS:
            o_x = places(o_s, o_c, C, S, True, USES_INT64)
        tl.store(p_y + base + o_x, b_x.to(p_y.dtype.element_ty), mask=m_x)
    else:
        if OP == "amin":
            b_x = -b_x
        b_x = tl.where(m_c[None, :], b_x, 0.0 if OP == "sum" or OP == "mean" else float("-inf"))
        m_s = o_s < S
        base = i_n.to(tl.int64) * S
        if OP == "logsumexp":
            b_y = row_logsumexp(b_x)
        elif OP == "amax" or OP == "amin":
            b_y = row_largest(b_x)
            if HAS_TAPS:
                b_tap = row_place(b_x, b_y, o_c[None, :])
                tl.store(p_taps + base + o_s, b_tap.to(p_taps.dtype.element_ty), mask=m_s)
            if OP == "amin":
                b_y = -b_y
        elif OP == "mean":
            b_y = tl.sum(b_x, axis=1) / tl.cast(C, ACC)
        else:
            b_y = tl.sum(b_x, axis=1)
        if HAS_REDUCED:
            tl.store(p_reduced + base + o_s, b_y.to(p_reduced.dtype.element_ty), mask=m_s)
        b_y = AFTER_FN(b_y, o_c, base, o_s, m_c, m_s, a0, a1, a2, a3, a4, a5)
        tl.store(p_y + base + o_s, b_y.to(p_y.dtype.element_ty), mask=m_s)
