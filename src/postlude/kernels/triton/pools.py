"""The last pass of a chain with a pool, including the steps after it; and a pool's gradient, which other passes call.

Names are as in normalize.py. NORM_STEPS_FN is all steps before the pool, computed for each position of a window. The
pooled value is [N, C, OS] or [N, OS, C], with one element per window. max_pool keeps its argmax as a tap: an index
within the window, counted from the window's first position even if that lies in the padding.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.tiles import beside, of_groups, own_channels, own_rows, places


@triton.jit
def positions_in(
    o, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr,
    IS_PADDING_COUNTED: tl.constexpr,
):  # fmt: skip
    """How many positions an average counts along one axis, for the windows `o`."""
    first = o * STRIDE - PAD
    end = tl.minimum(first + KERNEL, SIZE + PAD)
    return end - first if IS_PADDING_COUNTED else tl.minimum(end, SIZE) - tl.maximum(first, 0)


@triton.jit
def window_mean(
    total, z, y, x,
    D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    HAS_BORDER: tl.constexpr, IS_PADDING_COUNTED: tl.constexpr, DIVISOR: tl.constexpr,
):  # fmt: skip
    """The average over window (z, y, x) from the sum over it; from its gradient, the share of each position."""
    if DIVISOR > 0:
        mean = total / DIVISOR
    elif HAS_BORDER:
        size = positions_in(y, KH, STRIDE_H, PH, H, IS_PADDING_COUNTED)
        size *= positions_in(x, KW, STRIDE_W, PW, W, IS_PADDING_COUNTED)
        size *= positions_in(z, KD, STRIDE_D, PD, D, IS_PADDING_COUNTED)
        mean = total / tl.maximum(size, 1).to(total.dtype)  # lanes past the last window have size 0
    else:
        mean = total / (KD * KH * KW)
    return mean


@triton.jit
def pools_kernel(
    p_x,  # [N, C, D, H, W], or [N, D, H, W, C] where BLOCK_C and not HAS_SHORT_ROWS
    p_y,  # [N, C, OD, OH, OW] in the same layout, or contiguous where IS_OUT_CONTIGUOUS, out
    p_taps,  # shape of p_y, layout of p_x, out where HAS_TAPS: the tap of each window's largest
    p_mean, p_rstd,  # [N·G]
    a0, a1, a2, a3, a4, a5,
    C, CHUNKS,
    C_PER_GROUP,
    NORM_STEPS_FN: tl.constexpr,
    AFTER_FN: tl.constexpr,  # the steps after the pool
    HAS_NORM: tl.constexpr,
    OP: tl.constexpr,  # "max_pool" or "avg_pool"
    HAS_TAPS: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OD: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    HAS_BORDER: tl.constexpr,  # windows reach past the value
    IS_PADDING_COUNTED: tl.constexpr, DIVISOR: tl.constexpr,
    UNROLLED: tl.constexpr,  # rows of taps that are unrolled
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, HAS_SHORT_ROWS: tl.constexpr, USES_INT64: tl.constexpr,
    IS_OUT_CONTIGUOUS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = D * H * W
    OS: tl.constexpr = OD * OH * OW
    i_chunk, i_row, o_c, m_c, base = own_channels(C, S, CHUNKS, BLOCK_C)
    o_s = i_chunk * BLOCK_S + tl.arange(0, BLOCK_S)  # windows
    x = o_s % OW
    y = o_s // OW % OH
    z = o_s // (OW * OH)
    m_y = o_s < OS if BLOCK_C == 0 else (o_s < OS)[:, None] & m_c[None, :]  # [BLOCK_S], or [BLOCK_S, BLOCK_C]
    x_first = x * STRIDE_W - PW
    y_first = y * STRIDE_H - PH
    z_first = z * STRIDE_D - PD
    o_g = own_rows(i_row, o_c, C, BLOCK_C) // C_PER_GROUP
    mean, rstd = of_groups(p_mean, p_rstd, o_g, m_c, HAS_NORM, ACC)
    b_y = tl.full([BLOCK_S] if BLOCK_C == 0 else [BLOCK_S, BLOCK_C], float("-inf") if OP == "max_pool" else 0.0, ACC)
    b_tap = tl.zeros([BLOCK_S] if BLOCK_C == 0 else [BLOCK_S, BLOCK_C], tl.int32)
    if HAS_TAPS and HAS_BORDER:  # if all are −∞, the first tap that is inside
        first = (tl.maximum(-z_first, 0) * KH + tl.maximum(-y_first, 0)) * KW + tl.maximum(-x_first, 0)
        b_tap += first if BLOCK_C == 0 else first[:, None]
    for i_taps in tl.range(0, KD * KH, loop_unroll_factor=UNROLLED):
        i_z = z_first + i_taps // KH
        i_y = y_first + i_taps % KH
        m_row = (i_z >= 0) & (i_z < D) & (i_y >= 0) & (i_y < H)
        for i_tap in tl.static_range(KW):
            i_x = x_first + i_tap
            i_s = (i_z * H + i_y) * W + i_x
            m_x = m_y
            if HAS_BORDER:
                m_in = m_row & (i_x >= 0) & (i_x < W)
                m_x = m_y & (m_in if BLOCK_C == 0 else m_in[:, None])
            o_x = i_s if BLOCK_C == 0 else places(i_s, o_c, C, S, HAS_SHORT_ROWS, USES_INT64)
            b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
            b_x = NORM_STEPS_FN(
                b_x, mean, rstd, beside(o_c, BLOCK_C), base, o_x, beside(m_c, BLOCK_C), m_x, a0, a1, a2, a3, a4, a5
            )
            if OP == "max_pool":
                wins = (b_x > b_y) | ~(b_x <= float("inf"))  # a NaN wins
                if HAS_BORDER:
                    wins = wins & m_x
                b_y = tl.where(wins, b_x, b_y)
                if HAS_TAPS:
                    b_tap = tl.where(wins, i_taps * KW + i_tap, b_tap)
            else:
                b_y += tl.where(m_x, b_x, 0.0) if HAS_BORDER else b_x
    if OP == "avg_pool":
        if BLOCK_C > 0:
            z, y, x = z[:, None], y[:, None], x[:, None]
        b_y = window_mean(
            b_y, z, y, x, D, H, W, KD, KH, KW, STRIDE_D, STRIDE_H, STRIDE_W, PD, PH, PW,
            HAS_BORDER, IS_PADDING_COUNTED, DIVISOR,
        )  # fmt: skip
    base = i_row.to(tl.int64) * OS if BLOCK_C == 0 else i_row.to(tl.int64) * OS * C
    o_y = o_s if BLOCK_C == 0 else places(o_s, o_c, C, OS, HAS_SHORT_ROWS or IS_OUT_CONTIGUOUS, USES_INT64)
    b_y = AFTER_FN(b_y, beside(o_c, BLOCK_C), base, o_y, beside(m_c, BLOCK_C), m_y, a0, a1, a2, a3, a4, a5)
    tl.store(p_y + base + o_y, b_y.to(p_y.dtype.element_ty), mask=m_y)
    if HAS_TAPS:
        o_taps = o_s if BLOCK_C == 0 else places(o_s, o_c, C, OS, HAS_SHORT_ROWS, USES_INT64)
        tl.store(p_taps + base + o_taps, b_tap.to(tl.uint8), mask=m_y)


@triton.jit
def pool_gradient(
    p_g, p_taps, like, base, o_x, m_x,
    IS_CHANNELS_LAST: tl.constexpr, OP: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OD: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    HAS_BORDER: tl.constexpr, IS_PADDING_COUNTED: tl.constexpr, DIVISOR: tl.constexpr,
):  # fmt: skip
    """The gradient at a pool's input, gathered from the gradient p_g of the pooled value, in the dtype of `like`.

    `base` is where a row or a sample of the input begins, and o_x are offsets from there. The input is
    [N, C, D, H, W], or [N, D, H, W, C] where IS_CHANNELS_LAST.
    """
    S: tl.constexpr = D * H * W
    OS: tl.constexpr = OD * OH * OW
    i_c = o_x % C if IS_CHANNELS_LAST else o_x // S
    i_s = o_x // C if IS_CHANNELS_LAST else o_x % S
    base = base // S * OS
    # Remainders as differences: of `i_s % W + PW` LLVM makes additions of pairs of 16-bit integers, and ptxas 12.8 may
    # add the wrong constant of the two (neighbours got the same window).
    row = i_s // W
    plane = row // H
    x = i_s - row * W + PW
    y = row - plane * H + PH
    z = plane + PD
    b_g = tl.zeros_like(like)
    for i_z in tl.static_range((KD + STRIDE_D - 1) // STRIDE_D):
        for i_y in tl.static_range((KH + STRIDE_H - 1) // STRIDE_H):
            for i_x in tl.static_range((KW + STRIDE_W - 1) // STRIDE_W):
                o_d = z // STRIDE_D - i_z  # a window that may contain the position
                o_h = y // STRIDE_H - i_y
                o_w = x // STRIDE_W - i_x
                t_d = z - o_d * STRIDE_D  # the tap within that window
                t_h = y - o_h * STRIDE_H
                t_w = x - o_w * STRIDE_W
                m_g = m_x & (o_d >= 0) & (o_d < OD) & (t_d < KD)
                m_g = m_g & (o_h >= 0) & (o_h < OH) & (t_h < KH)
                m_g = m_g & (o_w >= 0) & (o_w < OW) & (t_w < KW)
                i_o = (o_d * OH + o_h) * OW + o_w
                o_g = base + (i_o * C + i_c if IS_CHANNELS_LAST else i_c * OS + i_o)
                g = tl.load(p_g + o_g, mask=m_g, other=0.0).to(like.dtype)
                if OP == "max_pool":
                    tap = tl.load(p_taps + o_g, mask=m_g, other=255).to(tl.int32)
                    b_g += tl.where(m_g & (tap == (t_d * KH + t_h) * KW + t_w), g, 0.0)
                else:
                    b_g += window_mean(
                        g, o_d, o_h, o_w, D, H, W, KD, KH, KW, STRIDE_D, STRIDE_H, STRIDE_W, PD, PH, PW,
                        HAS_BORDER, IS_PADDING_COUNTED, DIVISOR,
                    )  # fmt: skip
    return b_g
