"""What each tap of a convolution reads of its input, added up over all outputs; and the gradient of those sums.

A sum over all positions of a convolution's result needs no more than this: it is the product of these sums with the
weight. Tap t reads the input position i for the output i·stride + t·dilation − padding of a transposed convolution, and
for the output i − t·dilation + padding of a plain one (of stride 1), if there is such an output. A tile is [BLOCK_H
rows, BLOCK_W positions]; the rows of a channel are numbered through all its slices.
"""

import triton
import triton.language as tl


@triton.jit
def is_read(
    i, tap, OUT,
    STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr, IS_CONV_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Whether a tap reads position `i` of an axis for one of its OUT outputs."""
    o = i * STRIDE + tap * DILATION - PAD if IS_CONV_TRANSPOSED else i - tap * DILATION + PAD
    return (o >= 0) & (o < OUT)


@triton.jit
def rows_read(
    o_r, o_t, H, OD, OH, KH: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, DILATION_D: tl.constexpr, DILATION_H: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, IS_CONV_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Whether the taps (z, y) number `o_t` read rows `o_r`, [BLOCK_H, BLOCK_TAPS]."""
    i_z, i_y = (o_r // H)[:, None], (o_r % H)[:, None]
    m_z = is_read(i_z, (o_t // KH)[None, :], OD, STRIDE_D, DILATION_D, PD, IS_CONV_TRANSPOSED)
    return m_z & is_read(i_y, (o_t % KH)[None, :], OH, STRIDE_H, DILATION_H, PH, IS_CONV_TRANSPOSED)


@triton.jit
def tap_sums_kernel(
    p_x,  # [N·C, D·H, W]
    p_y,  # [CHUNKS, N·C, TAP_ROWS, KW], float64, out
    H, W, OD, OH, OW,
    ROWS,  # of a channel: D·H
    ROWS_PER_PROGRAM,  # one chunk
    KH: tl.constexpr, KW: tl.constexpr, TAP_ROWS: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, IS_CONV_TRANSPOSED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, BLOCK_KW: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)  # in [N·C]
    i_chunk = tl.program_id(1).to(tl.int64)
    first = tl.program_id(1) * ROWS_PER_PROGRAM
    end = tl.minimum(first + ROWS_PER_PROGRAM, ROWS)
    o_t = tl.arange(0, BLOCK_TAPS)
    o_k = tl.arange(0, BLOCK_KW)
    total = tl.zeros([BLOCK_TAPS, BLOCK_KW], tl.float64)
    for row in range(first, end, BLOCK_H):
        o_r = row + tl.arange(0, BLOCK_H)
        m_t = rows_read(
            o_r, o_t, H, OD, OH, KH, STRIDE_D, STRIDE_H, DILATION_D, DILATION_H, PD, PH, IS_CONV_TRANSPOSED
        )  # fmt: skip
        for start in range(0, W, BLOCK_W):
            o_w = start + tl.arange(0, BLOCK_W)
            m_x = (o_r < end)[:, None] & (o_w < W)[None, :]
            b_x = tl.load(p_x + (i_row * ROWS + o_r[:, None]) * W + o_w[None, :], mask=m_x, other=0.0)
            for k in tl.static_range(KW):
                m_w = is_read(o_w, k, OW, STRIDE_W, DILATION_W, PW, IS_CONV_TRANSPOSED)
                b_row = tl.sum(tl.where(m_w[None, :], b_x, 0.0), axis=1).to(tl.float64)  # [BLOCK_H]
                b_tap = tl.sum(tl.where(m_t, b_row[:, None], 0.0), axis=0)  # [BLOCK_TAPS]
                total += tl.where((o_k == k)[None, :], b_tap[:, None], 0.0)
    o_y = ((i_chunk * tl.num_programs(0) + i_row) * TAP_ROWS + o_t[:, None]) * KW + o_k[None, :]
    tl.store(p_y + o_y, total, mask=(o_t < TAP_ROWS)[:, None] & (o_k < KW)[None, :])


@triton.jit
def tap_sums_gradient_kernel(
    p_dy,  # [N·C, TAP_ROWS, KW], float64: the gradient of every sum
    p_dx,  # [N·C, D·H, W], out: each position adds up those of the taps that read it
    H, W, OD, OH, OW,
    ROWS, ROWS_PER_PROGRAM,
    KH: tl.constexpr, KW: tl.constexpr, TAP_ROWS: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, IS_CONV_TRANSPOSED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS_PER_PROGRAM
    end = tl.minimum(first + ROWS_PER_PROGRAM, ROWS)
    o_t = tl.arange(0, BLOCK_TAPS)
    m_tap = o_t < TAP_ROWS
    for row in range(first, end, BLOCK_H):
        o_r = row + tl.arange(0, BLOCK_H)
        m_t = rows_read(
            o_r, o_t, H, OD, OH, KH, STRIDE_D, STRIDE_H, DILATION_D, DILATION_H, PD, PH, IS_CONV_TRANSPOSED
        )  # fmt: skip
        for start in range(0, W, BLOCK_W):
            o_w = start + tl.arange(0, BLOCK_W)
            b_dx = tl.zeros([BLOCK_H, BLOCK_W], ACC)
            for k in tl.static_range(KW):
                b_tap = tl.load(p_dy + (i_row * TAP_ROWS + o_t) * KW + k, mask=m_tap, other=0.0)  # [BLOCK_TAPS]
                b_row = tl.sum(tl.where(m_t, b_tap[None, :], 0.0), axis=1).to(ACC)  # [BLOCK_H]
                m_w = is_read(o_w, k, OW, STRIDE_W, DILATION_W, PW, IS_CONV_TRANSPOSED)
                b_dx += tl.where(m_w[None, :], b_row[:, None], 0.0)
            m_x = (o_r < end)[:, None] & (o_w < W)[None, :]
            o_x = (i_row * ROWS + o_r[:, None]) * W + o_w[None, :]
            tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_x)
