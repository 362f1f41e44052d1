"""The weight's gradient of a convolution: a GEMM over positions, of the packed gradient and the packed input.

Both operands are packed with the same pitch (see pack.py), so the input that tap (z, y, x) reads for an output lies a
fixed number of rows after it. This is split-K over positions: a program takes a group of taps and a range of positions,
and the partial sums of a tap are added afterwards in a fixed order. A program loads one tile of the gradient and
multiplies it with a tile of the input for each tap of its group. A group is the taps along x, or some of them if there
are more than three; with few channels it is taps along y.

With few channels a row of the GEMM is NEIGHBOURS neighbouring positions: their gradients on one side, and on the other
all inputs that their taps along x read. The product of output (j, o) and input (t, c) then belongs to tap t − j.

With strides the input is packed by residue (see residues.py), a group is taps along x, and NEIGHBOURS is 1.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.planes import multiply
from postlude.kernels.triton.residues import tap_offset


@triton.jit
def product(g, g_low, x, x_low, acc, PLANES: tl.constexpr, IS_AB_SWAPPED: tl.constexpr, ACC: tl.constexpr):
    """acc + gᵀ · x, or xᵀ · g."""
    if IS_AB_SWAPPED:
        acc = multiply(x.T, x_low.T, g, g_low, acc, PLANES, ACC)
    else:
        acc = multiply(g.T, g_low.T, x, x_low, acc, PLANES, ACC)
    return acc


@triton.jit
def weight_gradient_kernel(
    d_x,  # [FRONT_ROWS + positions / NEIGHBOURS, …], the packed input; rows overlap where NEIGHBOURS is more than 1
    d_x_low,  # its low plane, where PLANES is 2
    d_g,  # [positions / NEIGHBOURS, NEIGHBOURS·C_OUT], the packed gradient
    d_g_low,
    p_out,  # [SPLITS, TAP_GROUPS·PRODUCTS_PER_GROUP, PRODUCT_M, PRODUCT_N], out
    PRODUCT_M,  # NEIGHBOURS · output channels, padded
    PRODUCT_N,  # input channels of NEIGHBOURS − 1 + KW positions, padded; of one where NEIGHBOURS is 1
    K_STEPS,  # of BLOCK_K rows, for one program
    ROW_PITCH, SLICE_PITCH,
    RESIDUE_PITCH,  # positions of one residue's volume, all samples, where there are strides
    PRODUCT_PITCH,  # positions of the input from one product of a group to the next
    GRADIENT_SHIFT,  # positions by which a gradient lies behind its output's position
    C_PACKED,  # channels of a packed position of the input
    TAP_GROUPS: tl.constexpr,
    TAP_GROUPS_PER_SLICE: tl.constexpr,  # of one z
    TAP_GROUPS_PER_ROW: tl.constexpr,  # of one (z, y)
    FRONT_ROWS: tl.constexpr,  # rows before the input's first
    PRODUCTS_PER_GROUP: tl.constexpr,  # tiles of the input for one tile of the gradient
    KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    NEIGHBOURS: tl.constexpr, PLANES: tl.constexpr,
    IS_AB_SWAPPED: tl.constexpr,  # compute xᵀ · g: tensor cores are faster with the longer side as columns
    BLOCK_M: tl.constexpr,  # rows of a tile
    BLOCK_N: tl.constexpr,  # columns of a tile
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    i_group = tl.program_id(0) % TAP_GROUPS
    i_split = tl.program_id(0) // TAP_GROUPS
    o0 = tl.program_id(1) * BLOCK_M
    c0 = tl.program_id(2) * BLOCK_N
    # The offset may be negative and division rounds towards 0, so NEIGHBOURS·GRADIENT_SHIFT is added to it first.
    y = i_group % TAP_GROUPS_PER_SLICE // TAP_GROUPS_PER_ROW * (1 if NEIGHBOURS == 1 else PRODUCTS_PER_GROUP)
    offset = (
        i_group // TAP_GROUPS_PER_SLICE * SLICE_PITCH
        + y * ROW_PITCH
        + i_group % TAP_GROUPS_PER_ROW * PRODUCTS_PER_GROUP
        + (NEIGHBOURS - 1) * GRADIENT_SHIFT
    )
    row0 = offset // NEIGHBOURS - GRADIENT_SHIFT + FRONT_ROWS
    column0 = offset % NEIGHBOURS * C_PACKED + c0
    row1 = (offset + PRODUCT_PITCH) // NEIGHBOURS - GRADIENT_SHIFT + FRONT_ROWS
    column1 = (offset + PRODUCT_PITCH) % NEIGHBOURS * C_PACKED + c0
    row2 = (offset + 2 * PRODUCT_PITCH) // NEIGHBOURS - GRADIENT_SHIFT + FRONT_ROWS
    column2 = (offset + 2 * PRODUCT_PITCH) % NEIGHBOURS * C_PACKED + c0
    if STRIDE_D * STRIDE_H * STRIDE_W > 1:
        z, x0 = i_group // TAP_GROUPS_PER_SLICE, i_group % TAP_GROUPS_PER_ROW * PRODUCTS_PER_GROUP
        row0 = tap_offset(
            z, y, x0, ROW_PITCH, SLICE_PITCH, RESIDUE_PITCH, KH, KW, STRIDE_D, STRIDE_H, STRIDE_W
        ) - GRADIENT_SHIFT  # fmt: skip
        row1 = tap_offset(
            z, y, x0 + 1, ROW_PITCH, SLICE_PITCH, RESIDUE_PITCH, KH, KW, STRIDE_D, STRIDE_H, STRIDE_W
        ) - GRADIENT_SHIFT  # fmt: skip
        row2 = tap_offset(
            z, y, x0 + 2, ROW_PITCH, SLICE_PITCH, RESIDUE_PITCH, KH, KW, STRIDE_D, STRIDE_H, STRIDE_W
        ) - GRADIENT_SHIFT  # fmt: skip
    first = i_split * K_STEPS * BLOCK_K
    acc0 = tl.zeros([BLOCK_N, BLOCK_M] if IS_AB_SWAPPED else [BLOCK_M, BLOCK_N], ACC)
    acc1 = tl.zeros_like(acc0)
    acc2 = tl.zeros_like(acc0)
    for step in tl.range(0, K_STEPS, num_stages=STAGES):
        row = first + step * BLOCK_K
        g = d_g.load([row, o0])  # [BLOCK_K, BLOCK_M]
        g_low = d_g_low.load([row, o0]) if PLANES == 2 else g
        x = d_x.load([row + row0, column0])  # [BLOCK_K, BLOCK_N]
        x_low = d_x_low.load([row + row0, column0]) if PLANES == 2 else x
        acc0 = product(g, g_low, x, x_low, acc0, PLANES, IS_AB_SWAPPED, ACC)
        if PRODUCTS_PER_GROUP > 1:
            x = d_x.load([row + row1, column1])
            x_low = d_x_low.load([row + row1, column1]) if PLANES == 2 else x
            acc1 = product(g, g_low, x, x_low, acc1, PLANES, IS_AB_SWAPPED, ACC)
        if PRODUCTS_PER_GROUP > 2:
            x = d_x.load([row + row2, column2])
            x_low = d_x_low.load([row + row2, column2]) if PLANES == 2 else x
            acc2 = product(g, g_low, x, x_low, acc2, PLANES, IS_AB_SWAPPED, ACC)
    o_row = o0 + tl.arange(0, BLOCK_M)
    o_column = c0 + tl.arange(0, BLOCK_N)
    o_out = o_row[:, None] * PRODUCT_N + o_column[None, :]  # [BLOCK_M, BLOCK_N]
    m_out = (o_row < PRODUCT_M)[:, None] & (o_column < PRODUCT_N)[None, :]
    if IS_AB_SWAPPED:
        o_out, m_out = o_out.T, m_out.T
    p_out += (i_split.to(tl.int64) * TAP_GROUPS + i_group) * PRODUCTS_PER_GROUP * PRODUCT_M * PRODUCT_N
    tl.store(p_out + o_out, acc0, mask=m_out)
    if PRODUCTS_PER_GROUP > 1:
        tl.store(p_out + PRODUCT_M * PRODUCT_N + o_out, acc1, mask=m_out)
    if PRODUCTS_PER_GROUP > 2:
        tl.store(p_out + 2 * PRODUCT_M * PRODUCT_N + o_out, acc2, mask=m_out)


@triton.jit
def add_splits_kernel(
    p_parts,  # [SPLITS, PRODUCTS, PRODUCT_M, PRODUCT_N]: of one tap, or of one (z, y) where NEIGHBOURS is more than 1
    p_x_largest,  # [C_IN] where IS_SCALED
    p_g_largest,  # [C_OUT] where IS_SCALED
    p_out,  # the weight's gradient, [C_OUT, C_IN, TAPS] through its strides, out
    SPLITS, PRODUCTS, PRODUCT_M, PRODUCT_N, C_IN, stride_o, stride_c, stride_tap,
    TAPS: tl.constexpr, KW: tl.constexpr, NEIGHBOURS: tl.constexpr, IS_FLIPPED: tl.constexpr, IS_SCALED: tl.constexpr,
    BLOCK_C: tl.constexpr, ACC: tl.constexpr,
    SCALE_FN: tl.constexpr,  # the function that packing scaled with
):  # fmt: skip
    i_tap = tl.program_id(0) % TAPS
    i_o = tl.program_id(0) // TAPS
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C_IN
    total = tl.zeros([BLOCK_C], ACC)
    further = 0  # offset to the next neighbour's part: its output channels, and the inputs one position further on
    if NEIGHBOURS == 1:
        p_parts += (i_tap * PRODUCT_M + i_o) * PRODUCT_N
    else:
        position = PRODUCT_N // (NEIGHBOURS - 1 + KW)
        further = PRODUCT_M // NEIGHBOURS * PRODUCT_N + position
        p_parts += (i_tap // KW * PRODUCT_M + i_o) * PRODUCT_N + i_tap % KW * position
    for _ in range(SPLITS):
        for j in tl.static_range(NEIGHBOURS):
            total += tl.load(p_parts + j * further + o_c, mask=m_c, other=0.0)
        p_parts += PRODUCTS * PRODUCT_M * PRODUCT_N
    if IS_SCALED:
        x_scale = SCALE_FN(tl.load(p_x_largest + o_c, mask=m_c, other=0).to(tl.float32, bitcast=True))
        g_scale = SCALE_FN(tl.load(p_g_largest + i_o).to(tl.float32, bitcast=True))
        total = total / x_scale / g_scale
    tap = TAPS - 1 - i_tap if IS_FLIPPED else i_tap
    o_out = i_o * stride_o + o_c * stride_c + tap * stride_tap
    tl.store(p_out + o_out, total.to(p_out.dtype.element_ty), mask=m_c)
