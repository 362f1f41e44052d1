"""The weight's gradient of a convolution: a matrix product over positions, of the packed gradient and the packed input.

Both operands lie in volumes of the same pitch (see pack.py), so the input that tap (z, y, x) multiplied at an output
is found a fixed number of rows further on. A program takes a group of taps and a stretch of positions; the tiles of
the input that it multiplies with one tile of the gradient are those of the taps along x, or of some of them where they
are more than three, or, where there are few channels, along y. What the programs of one tap find is added up
afterwards, in order.

With few channels a row of the product is J neighbouring positions: J gradients side by side and all inputs that their
taps along x read, so that output (j, o) × input (t, c) belongs to tap t − j.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.planes import multiply


@triton.jit
def product(g, g_low, x, x_low, acc, PLANES: tl.constexpr, TURNED: tl.constexpr, ACC: tl.constexpr):
    """acc + gᵀ · x, or xᵀ · g."""
    if TURNED:
        acc = multiply(x.T, x_low.T, g, g_low, acc, PLANES, ACC)
    else:
        acc = multiply(g.T, g_low.T, x, x_low, acc, PLANES, ACC)
    return acc


@triton.jit
def weight_gradient_kernel(
    d_x,  # descriptor [FRONT + positions / J, …] over the packed input; rows overlap where J is more than 1
    d_x_low,  # its low plane, where PLANES is 2
    d_g,  # descriptor [positions / J, J·COUT] over the packed gradient
    d_g_low,
    p_out,  # [SPLITS, GROUPS·SHARED, ROWS, COLUMNS], out
    ROWS,  # J · output channels, padded
    COLUMNS,  # input channels of J − 1 + KW positions, padded; of one where J is 1
    STEPS,  # of BK rows, for one program
    PITCH, PLANE,
    NEXT,  # positions from one of the SHARED tiles to the next
    SHIFT,  # positions by which the gradient lies behind its output's
    C,  # channels of a packed position of the input
    GROUPS: tl.constexpr,
    PER_PLANE: tl.constexpr,  # groups of one z
    PER_ROW: tl.constexpr,  # groups of one y
    FRONT: tl.constexpr,  # rows before the input's first
    SHARED: tl.constexpr,  # tiles of the input for one tile of the gradient
    J: tl.constexpr, PLANES: tl.constexpr,
    TURNED: tl.constexpr,  # columns are the rows of what the tensor cores multiply: the longer side is the better other
    BM: tl.constexpr,  # rows of a tile
    BN: tl.constexpr,  # columns of a tile
    BK: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    i_group = tl.program_id(0) % GROUPS
    i_split = tl.program_id(0) // GROUPS
    o0 = tl.program_id(1) * BM
    c0 = tl.program_id(2) * BN
    # J·SHIFT more than the offset, which may be negative: division rounds towards 0.
    y = i_group % PER_PLANE // PER_ROW * (1 if J == 1 else SHARED)
    offset = i_group // PER_PLANE * PLANE + y * PITCH + i_group % PER_ROW * SHARED + (J - 1) * SHIFT
    row0 = offset // J - SHIFT + FRONT
    column0 = offset % J * C + c0
    row1 = (offset + NEXT) // J - SHIFT + FRONT
    column1 = (offset + NEXT) % J * C + c0
    row2 = (offset + 2 * NEXT) // J - SHIFT + FRONT
    column2 = (offset + 2 * NEXT) % J * C + c0
    first = i_split * STEPS * BK
    acc0 = tl.zeros([BN, BM] if TURNED else [BM, BN], ACC)
    acc1 = tl.zeros_like(acc0)
    acc2 = tl.zeros_like(acc0)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        row = first + step * BK
        g = d_g.load([row, o0])  # [BK, BM]
        g_low = d_g_low.load([row, o0]) if PLANES == 2 else g
        x = d_x.load([row + row0, column0])  # [BK, BN]
        x_low = d_x_low.load([row + row0, column0]) if PLANES == 2 else x
        acc0 = product(g, g_low, x, x_low, acc0, PLANES, TURNED, ACC)
        if SHARED > 1:
            x = d_x.load([row + row1, column1])
            x_low = d_x_low.load([row + row1, column1]) if PLANES == 2 else x
            acc1 = product(g, g_low, x, x_low, acc1, PLANES, TURNED, ACC)
        if SHARED > 2:
            x = d_x.load([row + row2, column2])
            x_low = d_x_low.load([row + row2, column2]) if PLANES == 2 else x
            acc2 = product(g, g_low, x, x_low, acc2, PLANES, TURNED, ACC)
    o_row = o0 + tl.arange(0, BM)
    o_column = c0 + tl.arange(0, BN)
    o_out = o_row[:, None] * COLUMNS + o_column[None, :]  # [BM, BN]
    m_out = (o_row < ROWS)[:, None] & (o_column < COLUMNS)[None, :]
    if TURNED:
        o_out, m_out = o_out.T, m_out.T
    p_out += (i_split.to(tl.int64) * GROUPS + i_group) * SHARED * ROWS * COLUMNS
    tl.store(p_out + o_out, acc0, mask=m_out)
    if SHARED > 1:
        tl.store(p_out + ROWS * COLUMNS + o_out, acc1, mask=m_out)
    if SHARED > 2:
        tl.store(p_out + 2 * ROWS * COLUMNS + o_out, acc2, mask=m_out)


@triton.jit
def add_splits_kernel(
    p_parts,  # [SPLITS, GROUPS, ROWS, COLUMNS]: one tap a group, or one (z, y) a group where J is more than 1
    p_x_largest,  # [C] where SCALED
    p_g_largest,  # [COUT] where SCALED
    p_out,  # the weight's gradient, [COUT, C, TAPS] through its strides, out
    SPLITS, GROUPS, ROWS, COLUMNS, C, stride_o, stride_c, stride_tap,
    TAPS: tl.constexpr, KW: tl.constexpr, J: tl.constexpr, FLIP: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
    SCALE: tl.constexpr,  # the function that packing scaled with
):  # fmt: skip
    i_tap = tl.program_id(0) % TAPS
    i_o = tl.program_id(0) // TAPS
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < C
    total = tl.zeros([BLOCK], ACC)
    further = 0  # to the parts of the next neighbour: its output channels, and inputs one position further on
    if J == 1:
        p_parts += (i_tap * ROWS + i_o) * COLUMNS
    else:
        position = COLUMNS // (J - 1 + KW)
        further = ROWS // J * COLUMNS + position
        p_parts += (i_tap // KW * ROWS + i_o) * COLUMNS + i_tap % KW * position
    for _ in range(SPLITS):
        for j in tl.static_range(J):
            total += tl.load(p_parts + j * further + o_c, mask=m_c, other=0.0)
        p_parts += GROUPS * ROWS * COLUMNS
    if SCALED:
        x_scale = SCALE(tl.load(p_x_largest + o_c, mask=m_c, other=0).to(tl.float32, bitcast=True))
        g_scale = SCALE(tl.load(p_g_largest + i_o).to(tl.float32, bitcast=True))
        total = total / x_scale / g_scale
    tap = TAPS - 1 - i_tap if FLIP else i_tap
    o_out = i_o * stride_o + o_c * stride_c + tap * stride_tap
    tl.store(p_out + o_out, total.to(p_out.dtype.element_ty), mask=m_c)
