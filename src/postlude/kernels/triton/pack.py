"""Packing: writes the operands of an implicit GEMM as two matrices, so that every tap is a shifted read of the first.

The input becomes a matrix with one row of channels per position of a padded volume. Only the front of each axis is
padded: a row is followed immediately by the next row's left border, so a read past the end of a row meets those zeros.
An output's position is the position of its first tap, and tap (z, y, x) lies z·SLICE_PITCH + y·ROW_PITCH + x positions
after it. planes.py says how a number is converted.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.planes import (
    finite_magnitude,
    flag_infinity,
    high_plane,
    scale_for,
    scale_of,
    store_planes,
)


@triton.jit
def largest_kernel(
    p_x,  # [N, C, S], or [N, S, C] where IS_CHANNELS_LAST
    p_largest,  # [C], bits of floats ≥ 0 as int32, which sort alike; zero at first; then the flag where FLAGS_INF
    C, S,
    CHUNKS,  # of a sample's positions; 1 where HAS_SHORT_ROWS
    TILES_PER_PROGRAM,  # of a chunk, or of as many samples where HAS_SHORT_ROWS
    IS_CHANNELS_LAST: tl.constexpr,
    HAS_SHORT_ROWS: tl.constexpr,  # BLOCK_S covers a sample's positions
    ALIGN: tl.constexpr,  # a power of two that divides S where the value is contiguous
    FLAGS_INF: tl.constexpr,  # write a 1 after the last channel if there is an infinity
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    S = S // ALIGN * ALIGN  # same value; shows the compiler that ALIGN divides it, also in masks
    blocks = tl.cdiv(C, BLOCK_C)
    i_chunk = tl.program_id(0) % CHUNKS
    o_c = tl.program_id(0) // CHUNKS % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    p_x += (tl.program_id(0) // CHUNKS // blocks).to(tl.int64) * (TILES_PER_PROGRAM if HAS_SHORT_ROWS else 1) * S * C
    largest = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    if FLAGS_INF:
        worst = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    for i in range(TILES_PER_PROGRAM):
        o_s = (0 if HAS_SHORT_ROWS else (i_chunk * TILES_PER_PROGRAM + i) * BLOCK_S) + tl.arange(0, BLOCK_S)
        o_x = (
            o_s[:, None].to(tl.int64) * (C if IS_CHANNELS_LAST else 1)
            + o_c[None, :].to(tl.int64) * (1 if IS_CHANNELS_LAST else S)
        )  # fmt: skip
        sample = tl.cast(i, tl.int64) * S * C if HAS_SHORT_ROWS else 0
        b_x = tl.load(p_x + sample + o_x, mask=(o_s < S)[:, None] & (o_c < C)[None, :], other=0.0)
        largest = tl.maximum(largest, finite_magnitude(b_x))
        if FLAGS_INF:
            worst = tl.maximum(worst, tl.abs(b_x.to(tl.float32)))
    tl.atomic_max(p_largest + o_c, tl.max(largest, axis=0).to(tl.int32, bitcast=True), mask=o_c < C, sem="relaxed")
    if FLAGS_INF:
        flag_infinity(p_largest + C, worst)


@triton.jit
def packed_row(i_row, N, D, H, PD, PH, SLICE_ROWS, SAMPLE_ROWS):
    """The sample, slice and row of the input that a packed row holds, and whether it holds any input."""
    i_n = i_row // SAMPLE_ROWS
    z = (i_row % SAMPLE_ROWS) // SLICE_ROWS - PD
    y = (i_row % SAMPLE_ROWS) % SLICE_ROWS - PH
    is_row = (z >= 0) & (z < D) & (y >= 0) & (y < H) & (i_n < N)
    return i_n, z, y, is_row


@triton.jit
def store_border(
    p_high, p_low, out, o_c, PW,
    C_PACKED: tl.constexpr, PLANES: tl.constexpr, BLOCK_PAD: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Stores the zeros in front of the packed row that begins at `out`."""
    if tl.program_id(1) == 0:
        o_pad = tl.arange(0, BLOCK_PAD)
        o_zero = o_pad[:, None] * C_PACKED + o_c[None, :]
        m_zero = (o_pad < PW)[:, None] & (o_c < C_PACKED)[None, :]
        zeros = tl.zeros([BLOCK_PAD, BLOCK_C], p_high.dtype.element_ty)
        tl.store(p_high + out + o_zero, zeros, mask=m_zero)
        if PLANES == 2:
            tl.store(p_low + out + o_zero, zeros, mask=m_zero)


@triton.jit
def pack_input_kernel(
    p_x,  # [N, C, D, H, W], or [N, D, H, W, C] where IS_CHANNELS_LAST
    p_high,  # [PACKED_ROWS, ROW_PITCH, C_PACKED], out
    p_low,  # the same, out, where PLANES is 2
    p_largest,  # [C] where IS_SCALED
    N, C, D, H, W,
    PD, PH, PW,  # padding in front of each axis
    ROW_PITCH,  # positions of a packed row: PW + W
    SLICE_ROWS, SAMPLE_ROWS,  # rows of a packed slice and of a packed sample, padding included
    C_PACKED: tl.constexpr,  # channels of a position, padded
    PLANES: tl.constexpr, IS_SCALED: tl.constexpr, KEEPS_INF: tl.constexpr, IS_CHANNELS_LAST: tl.constexpr,
    BLOCK_W: tl.constexpr,  # positions of the input
    BLOCK_C: tl.constexpr,
    BLOCK_PAD: tl.constexpr,  # a power of two, at least PW
):  # fmt: skip
    # One row per program, indexed by the input's positions: the compiler then sees that the loads are contiguous.
    i_row = tl.program_id(0)
    i_n, z, y, is_row = packed_row(i_row, N, D, H, PD, PH, SLICE_ROWS, SAMPLE_ROWS)
    o_w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    o_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_w = (o_w < W) & is_row
    m_c = o_c < C
    sample = i_n.to(tl.int64) * C * D * H * W
    row = (z * H + y) * W
    if IS_CHANNELS_LAST:
        o_x = (row + o_w)[:, None].to(tl.int64) * C + o_c[None, :]  # [BLOCK_W, BLOCK_C]
        b_x = tl.load(p_x + sample + o_x, mask=m_w[:, None] & m_c[None, :], other=0.0)
    else:
        o_x = o_c[:, None].to(tl.int64) * (D * H * W) + (row + o_w)[None, :]  # [BLOCK_C, BLOCK_W]
        b_x = tl.trans(tl.load(p_x + sample + o_x, mask=m_c[:, None] & m_w[None, :], other=0.0))
    b_s = b_x
    if IS_SCALED:
        scale = scale_of(p_largest, o_c, m_c)
        b_s = b_x.to(tl.float32) * scale[None, :]
    high = high_plane(b_x, b_s, KEEPS_INF, p_high.dtype.element_ty)
    out = i_row.to(tl.int64) * ROW_PITCH * C_PACKED
    o_out = (PW + o_w)[:, None] * C_PACKED + o_c[None, :]
    m_out = (o_w < W)[:, None] & (o_c < C_PACKED)[None, :]
    store_planes(p_high + out, p_low + out, o_out, high, b_s, m_out, PLANES, False)
    store_border(p_high, p_low, out, o_c, PW, C_PACKED, PLANES, BLOCK_PAD, BLOCK_C)


@triton.jit
def weight_scale(
    p_w, p_largest, i_o, C_OUT, C_IN, stride_o, stride_c, stride_tap,
    PACKED_TAPS: tl.constexpr, UNFOLDED_TAPS: tl.constexpr, C_PACKED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The scale of an output channel's weights, after they are divided by the scales of the input's channels."""
    largest = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, PACKED_TAPS * C_PACKED, BLOCK_K):
        o = start + tl.arange(0, BLOCK_K)
        o_c = o % C_PACKED // UNFOLDED_TAPS
        tap = o // C_PACKED * UNFOLDED_TAPS + o % C_PACKED % UNFOLDED_TAPS
        m = (o_c < C_IN) & (o // C_PACKED < PACKED_TAPS) & (i_o < C_OUT)
        b_w = tl.load(p_w + i_o * stride_o + o_c * stride_c + tap * stride_tap, mask=m, other=0.0)
        powers = scale_of(p_largest, o_c, o_c < C_IN)
        largest = tl.maximum(largest, finite_magnitude(b_w.to(tl.float32) / powers))
    return scale_for(tl.max(largest))


@triton.jit
def store_weights(
    p_out, p_largest, column, o, o_c, b_w, scale, C_IN,
    K: tl.constexpr, PLANES: tl.constexpr, IS_SCALED: tl.constexpr, KEEPS_INF: tl.constexpr,
):  # fmt: skip
    """Stores some weights of one column into [columns, PLANES·K], and flags an infinity among them."""
    b_s = b_w
    if IS_SCALED:
        powers = scale_of(p_largest, o_c, o_c < C_IN)
        b_s = b_w.to(tl.float32) / powers * scale
    high = high_plane(b_w, b_s, KEEPS_INF, p_out.dtype.element_ty)
    if KEEPS_INF and PLANES == 2:
        flag_infinity(p_largest + C_IN, b_w)
    out = column * (PLANES * K)
    store_planes(p_out + out, p_out + out + K, o, high, b_s, o < K, PLANES, False)


@triton.jit
def pack_weight_kernel(
    p_w,  # [C_OUT, C_IN, taps] through its strides
    p_out,  # [columns, PLANES·K], K = TAP_ROWS·SPAN·C_PACKED
    p_largest,  # [C_IN] of the input, where IS_SCALED; then the flag where KEEPS_INF
    p_unscale,  # [C_OUT], out, where IS_SCALED
    C_OUT, C_IN, stride_o, stride_c, stride_tap,
    TAP_ROWS: tl.constexpr,  # KD·KH
    KW: tl.constexpr,
    NEIGHBOURS: tl.constexpr,  # neighbouring outputs of one row of the product
    SPAN: tl.constexpr,  # NEIGHBOURS + KW − 1: the positions that they read
    UNFOLDED_TAPS: tl.constexpr,  # taps in one packed position (im2col); if several, NEIGHBOURS and KW are 1
    C_PACKED: tl.constexpr,
    BLOCK_C: tl.constexpr,  # output channels of a tile of the product
    PLANES: tl.constexpr, IS_SCALED: tl.constexpr, KEEPS_INF: tl.constexpr, IS_FLIPPED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    i_o = tl.program_id(0)  # up to C_OUT rounded to BLOCK_C
    i_w = tl.program_id(1)  # which of the neighbouring outputs
    K: tl.constexpr = TAP_ROWS * SPAN * C_PACKED
    scale = 1.0
    if IS_SCALED:
        scale = weight_scale(
            p_w, p_largest, i_o, C_OUT, C_IN, stride_o, stride_c, stride_tap,
            TAP_ROWS * KW, UNFOLDED_TAPS, C_PACKED, BLOCK_K,
        )  # fmt: skip
        if i_w == 0:
            tl.store(p_unscale + i_o, 1.0 / scale)
    column = (i_o // BLOCK_C) * (NEIGHBOURS * BLOCK_C) + i_w * BLOCK_C + i_o % BLOCK_C
    for start in range(0, K, BLOCK_K):
        o = start + tl.arange(0, BLOCK_K)
        o_c = o % C_PACKED // UNFOLDED_TAPS
        kw = (o // C_PACKED) % SPAN - i_w
        tap = ((o // (C_PACKED * SPAN)) * KW + kw) * UNFOLDED_TAPS + o % C_PACKED % UNFOLDED_TAPS
        m = (o_c < C_IN) & (kw >= 0) & (kw < KW) & (o < K) & (i_o < C_OUT)
        if IS_FLIPPED:
            tap = TAP_ROWS * KW * UNFOLDED_TAPS - 1 - tap
        b_w = tl.load(p_w + i_o * stride_o + o_c * stride_c + tap * stride_tap, mask=m, other=0.0)
        store_weights(p_out, p_largest, column, o, o_c, b_w, scale, C_IN, K, PLANES, IS_SCALED, KEEPS_INF)
