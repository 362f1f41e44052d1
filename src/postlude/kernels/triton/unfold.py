"""Packing an input of few channels by a partial im2col: a position holds the channels of several taps, so that a step
of the GEMM is as deep as with many channels.

With taps = UNFOLDED_H·UNFOLDED_W, column j of a position is channel j // taps of tap j % taps. Columns past the last
channel are zero, and so are taps outside the input. Along an unfolded axis a packed position is an output position.
Slices, and rows where only x is unfolded, follow one another as in pack.py.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.planes import high_plane, scale_of, store_planes


@triton.jit
def unfold_input_kernel(
    p_x,  # [N, C, D, H, W], or [N, D, H, W, C] where IS_CHANNELS_LAST
    p_high,  # [N·SAMPLE_ROWS, ROW_PITCH, C_PACKED], out
    p_low,  # the same, out, where PLANES is 2
    p_largest,  # [C] where IS_SCALED
    PACKED_ROWS,  # N·SAMPLE_ROWS
    C, D, H, W,
    PD, PH, PW,  # padding in front of each axis
    ROW_PITCH,  # positions of a packed row
    SLICE_ROWS, SAMPLE_ROWS,  # rows of a packed slice and of a packed sample
    C_PACKED: tl.constexpr,  # columns of a position, a power of two
    PLANES: tl.constexpr, IS_SCALED: tl.constexpr, KEEPS_INF: tl.constexpr,
    IS_CHANNELS_LAST: tl.constexpr, USES_INT64: tl.constexpr,
    UNFOLDED_H: tl.constexpr, UNFOLDED_W: tl.constexpr,  # taps along y and x in one packed position
    HAS_PADDING: tl.constexpr,  # along any axis; without it all taps lie inside the input
    ROWS_PER_PROGRAM: tl.constexpr,  # several, because one short row would not hide the latency
    BLOCK_W: tl.constexpr,  # positions
):  # fmt: skip
    o_j = tl.arange(0, C_PACKED)
    o_c = o_j // (UNFOLDED_H * UNFOLDED_W)
    t_y = o_j // UNFOLDED_W % UNFOLDED_H
    t_x = o_j % UNFOLDED_W
    blocks = tl.cdiv(ROW_PITCH, BLOCK_W)
    o_p = tl.program_id(0) % blocks * BLOCK_W + tl.arange(0, BLOCK_W)
    x = o_p[None, :] - PW + t_x[:, None]  # [C_PACKED, BLOCK_W]
    m_c = (o_c < C)[:, None] & (o_p < ROW_PITCH)[None, :]
    if HAS_PADDING:
        m_c = m_c & (x >= 0) & (x < W)
    channel = (o_c.to(tl.int64) if USES_INT64 else o_c)[:, None]
    o_x = x * C + channel if IS_CHANNELS_LAST else channel * (D * H * W) + x
    if IS_SCALED:
        scale = scale_of(p_largest, o_c, o_c < C)[:, None]
    o_out = o_p[:, None] * C_PACKED + o_j[None, :]  # [BLOCK_W, C_PACKED]
    m_out = (o_p < ROW_PITCH)[:, None]
    for i in tl.static_range(ROWS_PER_PROGRAM):
        i_row = tl.program_id(0) // blocks * ROWS_PER_PROGRAM + i
        z = (i_row % SAMPLE_ROWS) // SLICE_ROWS - PD
        y = (i_row % SAMPLE_ROWS) % SLICE_ROWS - PH + t_y  # [C_PACKED]
        m_x = m_c & (i_row < PACKED_ROWS)
        if HAS_PADDING:
            m_x = m_x & ((y >= 0) & (y < H) & (z >= 0) & (z < D))[:, None]
        sample = (i_row // SAMPLE_ROWS).to(tl.int64) * C * D * H * W
        row = (z * H + y) * W
        if IS_CHANNELS_LAST:
            row = (row.to(tl.int64) if USES_INT64 else row) * C
        b_x = tl.load(p_x + sample + (row[:, None] + o_x), mask=m_x, other=0.0)
        b_s = b_x
        if IS_SCALED:
            b_s = b_x.to(tl.float32) * scale
        high = high_plane(b_x, b_s, KEEPS_INF, p_high.dtype.element_ty)
        out = i_row.to(tl.int64) * ROW_PITCH * C_PACKED
        store_planes(p_high + out, p_low + out, o_out, high, b_s, m_out & (i_row < PACKED_ROWS), PLANES, True)
