"""The weight's gradient of a convolution: a matrix product over positions, of the packed input and the packed gradient.

Both operands lie in volumes of the same pitch (see pack.py), so the input that tap (z, y, x) multiplied at an output
is found a fixed number of rows further on. A program takes one (z, y) of the taps and a stretch of positions, with the
taps along x side by side: they share the gradient's tile. What the programs of one tap find is added up afterwards, in
order.
"""

import triton
import triton.language as tl


@triton.jit
def product(x_high, x_low, g_high, g_low, acc, PLANES: tl.constexpr, ACC: tl.constexpr):
    """acc + xᵀ · g, promoted to ordinary fp32 where two planes ask for its exactness."""
    if PLANES == 2:
        part = tl.dot(x_low.T, g_high)
        part = tl.dot(x_high.T, g_low, part)
        part = tl.dot(x_high.T, g_high, part)
        return acc + part
    return tl.dot(x_high.T, g_high, acc, out_dtype=ACC)


@triton.jit
def weight_gradient_kernel(
    d_x,  # descriptor [rows, C] over the packed input
    d_x_low,  # its low plane, where PLANES is 2
    d_g,  # descriptor [rows, COUT] over the packed gradient
    d_g_low,
    p_out,  # [SPLITS, KD·KH·KW, C, COUT], out
    C,
    COUT,
    STEPS,  # of BK rows, for one program
    PITCH,
    PLANE,
    SHIFT,  # rows by which the gradient lies behind its outputs' positions
    KD: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PLANES: tl.constexpr,
    BM: tl.constexpr,  # input channels of a tile
    BN: tl.constexpr,  # output channels of a tile
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    ACC: tl.constexpr,
):
    i_zy = tl.program_id(0) % (KD * KH)
    i_split = tl.program_id(0) // (KD * KH)
    c0 = tl.program_id(1) * BM
    o0 = tl.program_id(2) * BN
    offset = (i_zy // KH) * PLANE + (i_zy % KH) * PITCH - SHIFT
    first = i_split * STEPS * BK
    acc0 = tl.zeros([BM, BN], ACC)
    acc1 = tl.zeros([BM, BN], ACC)
    acc2 = tl.zeros([BM, BN], ACC)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        row = first + step * BK
        g = d_g.load([row, o0])  # [BK, BN]
        g_low = d_g_low.load([row, o0]) if PLANES == 2 else g
        x = d_x.load([row + offset, c0])  # [BK, BM]
        x_low = d_x_low.load([row + offset, c0]) if PLANES == 2 else x
        acc0 = product(x, x_low, g, g_low, acc0, PLANES, ACC)
        if KW > 1:
            x = d_x.load([row + offset + 1, c0])
            x_low = d_x_low.load([row + offset + 1, c0]) if PLANES == 2 else x
            acc1 = product(x, x_low, g, g_low, acc1, PLANES, ACC)
        if KW > 2:
            x = d_x.load([row + offset + 2, c0])
            x_low = d_x_low.load([row + offset + 2, c0]) if PLANES == 2 else x
            acc2 = product(x, x_low, g, g_low, acc2, PLANES, ACC)
    o_c = c0 + tl.arange(0, BM)
    o_o = o0 + tl.arange(0, BN)
    o_out = o_c[:, None] * COUT + o_o[None, :]
    m_out = (o_c < C)[:, None] & (o_o < COUT)[None, :]
    p_out += (i_split.to(tl.int64) * (KD * KH) + i_zy) * KW * C * COUT
    tl.store(p_out + o_out, acc0, mask=m_out)
    if KW > 1:
        tl.store(p_out + C * COUT + o_out, acc1, mask=m_out)
    if KW > 2:
        tl.store(p_out + 2 * C * COUT + o_out, acc2, mask=m_out)


@triton.jit
def add_splits_kernel(
    p_parts,  # [SPLITS, TAPS, C, COUT]
    p_x_largest,  # [C] where SCALED
    p_g_largest,  # [COUT] where SCALED
    p_out,  # the weight's gradient, [COUT, C, TAPS] through its strides, out
    SPLITS,
    C,
    COUT,
    stride_o,
    stride_c,
    stride_tap,
    TAPS: tl.constexpr,
    FLIP: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
    SCALE: tl.constexpr,  # the function that packing scaled with
):
    i_tap = tl.program_id(0) % TAPS
    i_c = tl.program_id(0) // TAPS
    o_o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_o = o_o < COUT
    total = tl.zeros([BLOCK], ACC)
    p_parts += (i_tap * C + i_c) * COUT
    for _ in range(SPLITS):
        total += tl.load(p_parts + o_o, mask=m_o, other=0.0)
        p_parts += TAPS * C * COUT
    if SCALED:
        x_scale = SCALE(tl.load(p_x_largest + i_c).to(tl.float32, bitcast=True))
        g_scale = SCALE(tl.load(p_g_largest + o_o, mask=m_o, other=0).to(tl.float32, bitcast=True))
        total = total / x_scale / g_scale
    tap = TAPS - 1 - i_tap if FLIP else i_tap
    o_out = o_o * stride_o + i_c * stride_c + tap * stride_tap
    tl.store(p_out + o_out, total.to(p_out.dtype.element_ty), mask=m_o)
