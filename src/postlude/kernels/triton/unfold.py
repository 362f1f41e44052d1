"""Packing an input of few channels: a position holds the channels of several taps, so that a step of the product is
as long as with many channels.

Column j of a position is channel j // TAPS of the tap j % TAPS; columns behind the last channel are zero, as are taps
outside of the input. Along an axis whose taps lie side by side a position is an output's; planes, and rows where only
taps along x lie side by side, follow one another as in pack.py.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.pack import not_zero, rest_of, scale_for


@triton.jit
def unfold_input_kernel(
    p_x,  # [N, C, D, H, W], or [N, D, H, W, C] where LAST
    p_high,  # [N, POSITIONS, CP], out
    p_low,  # the same, out, where PLANES is 2
    p_largest,  # [C] where SCALED
    C,
    D,
    H,
    W,
    PD,  # padding in front of each axis
    PH,
    PW,
    PITCH,  # positions of a packed row
    PLANE_ROWS,  # rows of a packed plane
    POSITIONS,  # of a packed sample
    CP: tl.constexpr,  # columns of a position, a power of two
    PLANES: tl.constexpr,
    SCALED: tl.constexpr,
    KEEPS: tl.constexpr,
    LAST: tl.constexpr,
    WIDE: tl.constexpr,
    TH: tl.constexpr,  # taps along y and x that lie side by side
    TW: tl.constexpr,
    BLOCK: tl.constexpr,  # positions
):
    # A tile goes on from row to row: rows are short, and a program for each would mostly wait.
    tiles = tl.cdiv(POSITIONS, BLOCK)
    i_n = (tl.program_id(0) // tiles).to(tl.int64)
    o_p = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    x = o_p % PITCH - PW
    y = o_p // PITCH % PLANE_ROWS - PH
    z = o_p // PITCH // PLANE_ROWS - PD
    o_j = tl.arange(0, CP)
    o_c = o_j // (TH * TW)
    t_y = o_j // TW % TH
    t_x = o_j % TW
    m_p = (o_p < POSITIONS) & (z >= 0) & (z < D)
    m_x = (o_c < C)[:, None] & m_p[None, :]  # [CP, BLOCK]
    m_x = m_x & (x[None, :] >= -t_x[:, None]) & (x[None, :] < W - t_x[:, None])
    m_x = m_x & (y[None, :] >= -t_y[:, None]) & (y[None, :] < H - t_y[:, None])
    position = (z * H + y) * W + x
    tap = t_y * W + t_x
    if WIDE:
        position, tap, o_c = position.to(tl.int64), tap.to(tl.int64), o_c.to(tl.int64)
    if LAST:
        o_x = (tap * C + o_c)[:, None] + (position * C)[None, :]
    else:
        o_x = (tap + o_c * (D * H * W))[:, None] + position[None, :]
    b_x = tl.load(p_x + i_n * C * D * H * W + o_x, mask=m_x, other=0.0)
    if KEEPS:
        b_given = b_x
    if SCALED:
        largest = tl.load(p_largest + o_c, mask=o_c < C, other=0).to(tl.float32, bitcast=True)
        b_x = b_x.to(tl.float32) * scale_for(largest)[:, None]
    high = b_x.to(p_high.dtype.element_ty)
    if KEEPS:
        high = not_zero(b_given, high)
    out = i_n * POSITIONS * CP
    o_out = (o_p.to(tl.int64) if WIDE else o_p)[:, None] * CP + o_j[None, :]  # [BLOCK, CP]
    m_out = (o_p < POSITIONS)[:, None]
    tl.store(p_high + out + o_out, tl.trans(high), mask=m_out)
    if PLANES == 2:
        tl.store(p_low + out + o_out, tl.trans(rest_of(b_x, high).to(p_low.dtype.element_ty)), mask=m_out)
