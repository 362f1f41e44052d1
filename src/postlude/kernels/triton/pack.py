"""Packing: the operands of a convolution as two matrices, so that every tap is a shifted read of the first.

The input becomes rows of channels, one per position of a padded volume. A row of the volume is followed at once by
the next one's left border, so the padding in front of each axis is all there is: reading past the end of a row meets
the next row's zeros. The position of an output is the position of its first tap, and tap (z, y, x) lies
z·PLANE + y·PITCH + x positions further on.

Half-precision planes: a number times a power of two is cut into fp16(number) and, where two planes are kept, fp16 of
what is left. The power brings the largest magnitude to 2¹⁴…2¹⁵, per channel of the input and per output channel of
the weight; the weight takes the input's powers back out, so only its own remain to be undone: p_unscale.

Where KEEPS, no norm follows, and an infinity must come out of the product as it would of PyTorch's convolution. In one
plane it does by itself, but for a number that rounds to zero beside it: `not_zero`. In two planes the product of the
high ones alone tells what becomes of it, which is computed where `p_largest` says behind its last channel that an
infinity was met.
"""

import triton
import triton.language as tl


@triton.jit
def finite_magnitude(x):
    """|x|, and 0 where x is not finite: an infinity must not set the scale of a whole channel."""
    magnitude = tl.abs(x.to(tl.float32))
    return tl.where(magnitude < float("inf"), magnitude, 0.0)  # also 0 for NaN


@triton.jit
def scale_for(largest):
    """The power of two that brings `largest` to 2¹⁴…2¹⁵; 1 for 0. Clamped where the power itself would overflow."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.where(largest == 0.0, 14, tl.maximum(exponent, -100))
    return ((127 + 14 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rest_of(x, high):
    """What the high plane leaves over of x; 0 for an infinity, which would be NaN."""
    rest = x - high.to(tl.float32)
    return tl.where(tl.abs(rest) < float("inf"), rest, 0.0)


@triton.jit
def not_zero(x, scaled):
    """`scaled`, with the smallest number of x's sign where half precision would make it zero and x is not: infinity
    times zero is NaN. Before the conversion, which then takes two numbers at a time."""
    tiny = tl.where(x < 0.0, -5.9604644775390625e-08, 5.9604644775390625e-08)  # 2⁻²⁴
    return tl.where((tl.abs(scaled) < 5.9604644775390625e-08) & (x != 0.0), tiny, scaled)


@triton.jit
def flag_infinity(p_flag, x):
    """Leaves a 1 where x has an infinity. Ordinarily nothing is written."""
    if tl.max(tl.abs(x.to(tl.float32))) == float("inf"):
        tl.atomic_max(p_flag, 1, sem="relaxed")


@triton.jit
def largest_kernel(
    p_x,  # [N, C, S], or [N, S, C] where LAST
    p_largest,  # [C], int32 bits of non-negative floats, which order as the floats do; 0 before, and the flag
    C,
    S,
    CHUNKS,  # of a sample's positions; 1 where SHORT
    TILES,  # of a chunk, or samples of a program where SHORT
    LAST: tl.constexpr,
    SHORT: tl.constexpr,  # BLOCK covers a sample's positions
    ALIGN: tl.constexpr,  # a power of two that divides S where the value is contiguous
    FLAGS: tl.constexpr,  # leave a 1 behind the last channel where there is an infinity
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    S = S // ALIGN * ALIGN  # the same number: a hint would not reach the masks
    blocks = tl.cdiv(C, BLOCK_C)
    i_chunk = tl.program_id(0) % CHUNKS
    o_c = tl.program_id(0) // CHUNKS % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    p_x += (tl.program_id(0) // CHUNKS // blocks).to(tl.int64) * (TILES if SHORT else 1) * S * C
    largest = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    if FLAGS:
        worst = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    for i in range(TILES):
        o_s = (0 if SHORT else (i_chunk * TILES + i) * BLOCK) + tl.arange(0, BLOCK)
        o_x = o_s[:, None].to(tl.int64) * (C if LAST else 1) + o_c[None, :].to(tl.int64) * (1 if LAST else S)
        sample = tl.cast(i, tl.int64) * S * C if SHORT else 0
        b_x = tl.load(p_x + sample + o_x, mask=(o_s < S)[:, None] & (o_c < C)[None, :], other=0.0)
        largest = tl.maximum(largest, finite_magnitude(b_x))
        if FLAGS:
            worst = tl.maximum(worst, tl.abs(b_x.to(tl.float32)))
    tl.atomic_max(p_largest + o_c, tl.max(largest, axis=0).to(tl.int32, bitcast=True), mask=o_c < C, sem="relaxed")
    if FLAGS:
        flag_infinity(p_largest + C, worst)


@triton.jit
def pack_input_kernel(
    p_x,  # [N, C, D, H, W], or [N, D, H, W, C] where LAST
    p_high,  # [ROWS, PITCH, CP], out
    p_low,  # the same, out, where PLANES is 2
    p_largest,  # [C] where SCALED
    N,
    C,
    D,
    H,
    W,
    PD,  # padding in front of each axis
    PH,
    PW,
    PITCH,  # positions of a packed row: PW + W
    PLANE_ROWS,  # rows of a packed plane and of a packed sample, padding included
    SAMPLE_ROWS,
    CP: tl.constexpr,  # channels of a position, padded
    PLANES: tl.constexpr,
    SCALED: tl.constexpr,
    KEEPS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,  # positions of the input
    BLOCK_C: tl.constexpr,
    PAD: tl.constexpr,  # a power of two, PW or more
):
    # One row a program, counted by the input's positions: the compiler then sees that neighbours lie side by side.
    i_row = tl.program_id(0)
    i_n = i_row // SAMPLE_ROWS
    z = (i_row % SAMPLE_ROWS) // PLANE_ROWS - PD
    y = (i_row % SAMPLE_ROWS) % PLANE_ROWS - PH
    is_row = (z >= 0) & (z < D) & (y >= 0) & (y < H) & (i_n < N)
    o_w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_w = (o_w < W) & is_row
    m_c = o_c < C
    sample = i_n.to(tl.int64) * C * D * H * W
    row = (z * H + y) * W
    if LAST:
        o_x = (row + o_w)[:, None].to(tl.int64) * C + o_c[None, :]  # [BLOCK, BLOCK_C]
        b_x = tl.load(p_x + sample + o_x, mask=m_w[:, None] & m_c[None, :], other=0.0)
    else:
        o_x = o_c[:, None].to(tl.int64) * (D * H * W) + (row + o_w)[None, :]  # [BLOCK_C, BLOCK]
        b_x = tl.trans(tl.load(p_x + sample + o_x, mask=m_c[:, None] & m_w[None, :], other=0.0))
    if KEEPS:
        b_given = b_x
    if SCALED:
        largest = tl.load(p_largest + o_c, mask=m_c, other=0).to(tl.float32, bitcast=True)
        b_x = b_x.to(tl.float32) * scale_for(largest)[None, :]
    high = (not_zero(b_given, b_x) if KEEPS else b_x).to(p_high.dtype.element_ty)
    out = i_row.to(tl.int64) * PITCH * CP
    o_out = (PW + o_w)[:, None] * CP + o_c[None, :]
    m_out = (o_w < W)[:, None] & (o_c < CP)[None, :]
    tl.store(p_high + out + o_out, high, mask=m_out)
    if PLANES == 2:
        tl.store(p_low + out + o_out, rest_of(b_x, high).to(p_low.dtype.element_ty), mask=m_out)
    if tl.program_id(1) == 0:
        o_pad = tl.arange(0, PAD)
        o_zero = o_pad[:, None] * CP + o_c[None, :]
        m_zero = (o_pad < PW)[:, None] & (o_c < CP)[None, :]
        zeros = tl.zeros([PAD, BLOCK_C], p_high.dtype.element_ty)
        tl.store(p_high + out + o_zero, zeros, mask=m_zero)
        if PLANES == 2:
            tl.store(p_low + out + o_zero, zeros, mask=m_zero)


@triton.jit
def pack_weight_kernel(
    p_w,  # [COUT, C, taps] through its strides
    p_out,  # [columns, PLANES·K], K = ROWS·SPAN·CP
    p_largest,  # [C] of the input, where SCALED; where KEEPS in two planes one more
    p_unscale,  # [COUT], out, where SCALED
    COUT,
    C,
    stride_o,
    stride_c,
    stride_tap,
    ROWS: tl.constexpr,  # taps but for the last axis
    KW: tl.constexpr,
    WIDTH: tl.constexpr,  # neighbouring outputs of one row of the product
    SPAN: tl.constexpr,  # WIDTH + KW − 1: the positions that they read
    UNFOLDED: tl.constexpr,  # taps whose channels lie side by side in a packed position: there WIDTH and KW are 1
    CP: tl.constexpr,
    BLOCK_O: tl.constexpr,  # channels of a block of columns
    PLANES: tl.constexpr,
    SCALED: tl.constexpr,
    KEEPS: tl.constexpr,
    FLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_o = tl.program_id(0)  # up to COUT rounded to BLOCK_O
    i_w = tl.program_id(1)  # which of the neighbouring outputs
    K: tl.constexpr = ROWS * SPAN * CP
    scale = 1.0
    if SCALED:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, ROWS * KW * CP, BLOCK):
            o = start + tl.arange(0, BLOCK)
            o_c = o % CP // UNFOLDED
            tap = o // CP * UNFOLDED + o % CP % UNFOLDED
            m = (o_c < C) & (o // CP < ROWS * KW) & (i_o < COUT)
            b_w = tl.load(p_w + i_o * stride_o + o_c * stride_c + tap * stride_tap, mask=m, other=0.0)
            powers = scale_for(tl.load(p_largest + o_c, mask=o_c < C, other=0).to(tl.float32, bitcast=True))
            largest = tl.maximum(largest, finite_magnitude(b_w.to(tl.float32) / powers))
        scale = scale_for(tl.max(largest))
        if i_w == 0:
            tl.store(p_unscale + i_o, 1.0 / scale)
    column = (i_o // BLOCK_O) * (WIDTH * BLOCK_O) + i_w * BLOCK_O + i_o % BLOCK_O
    for start in range(0, K, BLOCK):
        o = start + tl.arange(0, BLOCK)
        o_c = o % CP // UNFOLDED
        kw = (o // CP) % SPAN - i_w
        tap = ((o // (CP * SPAN)) * KW + kw) * UNFOLDED + o % CP % UNFOLDED
        m = (o_c < C) & (kw >= 0) & (kw < KW) & (o < K) & (i_o < COUT)
        if FLIP:
            tap = ROWS * KW * UNFOLDED - 1 - tap
        b_w = tl.load(p_w + i_o * stride_o + o_c * stride_c + tap * stride_tap, mask=m, other=0.0)
        if KEEPS:
            b_given = b_w
        if SCALED:
            powers = scale_for(tl.load(p_largest + o_c, mask=o_c < C, other=0).to(tl.float32, bitcast=True))
            b_w = b_w.to(tl.float32) / powers * scale
        high = (not_zero(b_given, b_w) if KEEPS else b_w).to(p_out.dtype.element_ty)
        if KEEPS and PLANES == 2:
            flag_infinity(p_largest + C, b_given)
        tl.store(p_out + column * (PLANES * K) + o, high, mask=o < K)
        if PLANES == 2:
            rest = rest_of(b_w, high)
            tl.store(p_out + column * (PLANES * K) + K + o, rest.to(p_out.dtype.element_ty), mask=o < K)
