"""Packing by residue: the input of a strided convolution, for implicit GEMMs in which every tap is a shifted read.

Along an axis, an output at p reads the input at p · STRIDE + tap − PAD. Inputs are packed as pack.py does, but those
whose place (padding included) has the same residue modulo STRIDE together, in a volume of cells of its own: tap t reads
cell p + t // STRIDE of residue t % STRIDE. All volumes have the same pitches: a tile of outputs reads a tile of cells.
Residues that no tap has are left out. plan/residues.py says how many cells a row needs.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.planes import high_plane, scale_of, store_planes


@triton.jit
def tap_offset(
    z, y, x, ROW_PITCH, SLICE_PITCH,
    RESIDUE_PITCH,  # positions of one residue's volume, all samples
    KH: tl.constexpr, KW: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
):  # fmt: skip
    """How many positions after an output's own position tap (z, y, x) reads."""
    RESIDUES_H: tl.constexpr = KH if KH < STRIDE_H else STRIDE_H
    RESIDUES_W: tl.constexpr = KW if KW < STRIDE_W else STRIDE_W
    residue = (z % STRIDE_D * RESIDUES_H + y % STRIDE_H) * RESIDUES_W + x % STRIDE_W
    cell = z // STRIDE_D * SLICE_PITCH + y // STRIDE_H * ROW_PITCH + x // STRIDE_W
    return residue * RESIDUE_PITCH + cell


@triton.jit
def tap_by_residue(i, KERNEL: tl.constexpr, STRIDE: tl.constexpr):
    """Tap number i of an axis, ordered by residue: its residue, and its cell after an output's own."""
    LONGER: tl.constexpr = KERNEL % STRIDE  # residues with one tap more than the others
    TAPS: tl.constexpr = (
        KERNEL // STRIDE if KERNEL >= STRIDE else 1
    )  # of the others; if they have none, none is asked for
    FIRST: tl.constexpr = LONGER * (KERNEL // STRIDE + 1)  # the first tap of the others
    is_longer = i < FIRST
    residue = tl.where(is_longer, i // (KERNEL // STRIDE + 1), LONGER + (i - FIRST) // TAPS)
    cell = tl.where(is_longer, i % (KERNEL // STRIDE + 1), (i - FIRST) % TAPS)
    return residue, cell


@triton.jit
def strided_step(
    i, ROW_PITCH, SLICE_PITCH,
    RESIDUE_PITCH,  # positions of one residue's volume, all samples
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    C_PACKED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """For step i of a product: rows after the outputs' own, column of the packed input, column of the packed weight.

    Channels are the outer loop, and taps are ordered by residue: programs that run together then read the same cells
    again while they are in L2. A wave of 128 × 264 outputs reads 17 MB per residue of 128 channels.
    """
    RESIDUES_H: tl.constexpr = KH if KH < STRIDE_H else STRIDE_H
    RESIDUES_W: tl.constexpr = KW if KW < STRIDE_W else STRIDE_W
    i_tap = i % (KD * KH * KW)
    column = i // (KD * KH * KW) * BLOCK_K
    z_residue, z = tap_by_residue(i_tap // (KH * KW), KD, STRIDE_D)
    y_residue, y = tap_by_residue(i_tap // KW % KH, KH, STRIDE_H)
    x_residue, x = tap_by_residue(i_tap % KW, KW, STRIDE_W)
    residue = (z_residue * RESIDUES_H + y_residue) * RESIDUES_W + x_residue
    row = residue * RESIDUE_PITCH + z * SLICE_PITCH + y * ROW_PITCH + x
    tap = ((z * STRIDE_D + z_residue) * KH + y * STRIDE_H + y_residue) * KW + x * STRIDE_W + x_residue
    return row, column, tap * C_PACKED + column


@triton.jit
def cells_at(
    place, PACKED_ROWS, ROW_PITCH, STRIDE_W: tl.constexpr, RESIDUES_W: tl.constexpr, C_PACKED: tl.constexpr
):  # fmt: skip
    """Where places along x, padding included, are packed, from the row of residue 0 on, and whether they are."""
    residue = place % STRIDE_W
    cell = place // STRIDE_W
    o_cell = residue.to(tl.int64) * PACKED_ROWS * ROW_PITCH * C_PACKED + cell * C_PACKED
    return o_cell, (residue < RESIDUES_W) & (cell < ROW_PITCH)


@triton.jit
def pack_residues_kernel(
    p_x,  # [N, C, D, H, W], or [N, D, H, W, C] where IS_CHANNELS_LAST
    p_high,  # [residues, PACKED_ROWS, ROW_PITCH, C_PACKED], out
    p_low,  # the same, out, where PLANES is 2
    p_largest,  # [C] where IS_SCALED
    N, C, D, H, W,
    PD, PH, PW,  # the convolution's padding
    ROW_PITCH,  # cells of a packed row
    SLICE_ROWS, SAMPLE_ROWS, PACKED_ROWS,  # of one residue
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    RESIDUES_H: tl.constexpr, RESIDUES_W: tl.constexpr,  # residues along y and x that are packed
    C_PACKED: tl.constexpr,  # channels of a position, padded
    PLANES: tl.constexpr, IS_SCALED: tl.constexpr, KEEPS_INF: tl.constexpr, IS_CHANNELS_LAST: tl.constexpr,
    BLOCK_W: tl.constexpr,  # positions of the input
    BLOCK_C: tl.constexpr,
    BLOCK_PAD: tl.constexpr,  # a power of two, at least the zeros of the packed rows of all residues along x
):  # fmt: skip
    # One row of the input per program, read in order; it belongs to one residue along z and y, and to all along x. A
    # position's channels are contiguous in memory, so cells of several residues are still written in long pieces.
    i_row = tl.program_id(0) % PACKED_ROWS
    residue_zy = tl.program_id(0) // PACKED_ROWS
    i_n = i_row // SAMPLE_ROWS
    z = i_row % SAMPLE_ROWS // SLICE_ROWS * STRIDE_D + residue_zy // RESIDUES_H - PD
    y = i_row % SAMPLE_ROWS % SLICE_ROWS * STRIDE_H + residue_zy % RESIDUES_H - PH
    is_row = (z >= 0) & (z < D) & (y >= 0) & (y < H) & (i_n < N)
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
    out = (residue_zy.to(tl.int64) * RESIDUES_W * PACKED_ROWS + i_row) * ROW_PITCH * C_PACKED
    o_cell, m_cell = cells_at(PW + o_w, PACKED_ROWS, ROW_PITCH, STRIDE_W, RESIDUES_W, C_PACKED)
    o_out = o_cell[:, None] + o_c[None, :]
    m_out = ((o_w < W) & m_cell)[:, None] & (o_c < C_PACKED)[None, :]
    store_planes(p_high + out, p_low + out, o_out, high, b_s, m_out, PLANES, False)
    if tl.program_id(1) == 0:  # the zeros in front of the row and behind it
        o_pad = tl.arange(0, BLOCK_PAD)
        place = tl.where(o_pad < PW, o_pad, o_pad + W)
        o_border, m_border = cells_at(place, PACKED_ROWS, ROW_PITCH, STRIDE_W, RESIDUES_W, C_PACKED)
        o_zero = o_border[:, None] + o_c[None, :]
        m_zero = m_border[:, None] & (o_c < C_PACKED)[None, :]
        zeros = tl.zeros([BLOCK_PAD, BLOCK_C], p_high.dtype.element_ty)
        tl.store(p_high + out + o_zero, zeros, mask=m_zero)
        if PLANES == 2:
            tl.store(p_low + out + o_zero, zeros, mask=m_zero)
