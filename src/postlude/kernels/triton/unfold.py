"""Packing an input of few channels: a position holds the channels of several taps, so that a step of the product is
as long as with many channels.

Column j of a position is channel j // TAPS of the tap j % TAPS; columns behind the last channel are zero, as are taps
outside of the input. Along an axis whose taps lie side by side a position is an output's; planes, and rows where only
taps along x lie side by side, follow one another as in pack.py.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.planes import high_plane, scale_of, store_planes


@triton.jit
def unfold_input_kernel(
    p_x,  # [N, C, D, H, W], or [N, D, H, W, C] where LAST
    p_high,  # [N·SAMPLE_ROWS, PITCH, CP], out
    p_low,  # the same, out, where PLANES is 2
    p_largest,  # [C] where SCALED
    ROWS,  # N·SAMPLE_ROWS
    C, D, H, W,
    PD, PH, PW,  # padding in front of each axis
    PITCH,  # positions of a packed row
    PLANE_ROWS, SAMPLE_ROWS,  # rows of a packed plane and of a packed sample
    CP: tl.constexpr,  # columns of a position, a power of two
    PLANES: tl.constexpr, SCALED: tl.constexpr, KEEPS: tl.constexpr, LAST: tl.constexpr, WIDE: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr,  # taps along y and x that lie side by side
    PADS: tl.constexpr,  # along any axis; without, a position's taps lie inside of the input
    EACH: tl.constexpr,  # rows of a program: one short row would mostly wait
    BLOCK: tl.constexpr,  # positions
):  # fmt: skip
    o_j = tl.arange(0, CP)
    o_c = o_j // (TH * TW)
    t_y = o_j // TW % TH
    t_x = o_j % TW
    blocks = tl.cdiv(PITCH, BLOCK)
    o_p = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    x = o_p[None, :] - PW + t_x[:, None]  # [CP, BLOCK]
    m_c = (o_c < C)[:, None] & (o_p < PITCH)[None, :]
    if PADS:
        m_c = m_c & (x >= 0) & (x < W)
    channel = (o_c.to(tl.int64) if WIDE else o_c)[:, None]
    o_x = x * C + channel if LAST else channel * (D * H * W) + x
    if SCALED:
        scale = scale_of(p_largest, o_c, o_c < C)[:, None]
    o_out = o_p[:, None] * CP + o_j[None, :]  # [BLOCK, CP]
    m_out = (o_p < PITCH)[:, None]
    for i in tl.static_range(EACH):
        i_row = tl.program_id(0) // blocks * EACH + i
        z = (i_row % SAMPLE_ROWS) // PLANE_ROWS - PD
        y = (i_row % SAMPLE_ROWS) % PLANE_ROWS - PH + t_y  # [CP]
        m_x = m_c & (i_row < ROWS)
        if PADS:
            m_x = m_x & ((y >= 0) & (y < H) & (z >= 0) & (z < D))[:, None]
        sample = (i_row // SAMPLE_ROWS).to(tl.int64) * C * D * H * W
        row = (z * H + y) * W
        if LAST:
            row = (row.to(tl.int64) if WIDE else row) * C
        b_x = tl.load(p_x + sample + (row[:, None] + o_x), mask=m_x, other=0.0)
        b_s = b_x
        if SCALED:
            b_s = b_x.to(tl.float32) * scale
        high = high_plane(b_x, b_s, KEEPS, p_high.dtype.element_ty)
        out = i_row.to(tl.int64) * PITCH * CP
        store_planes(p_high + out, p_low + out, o_out, high, b_s, m_out & (i_row < ROWS), PLANES, True)
