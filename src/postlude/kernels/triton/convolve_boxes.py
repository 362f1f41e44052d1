"""A convolution that reads rows of channels where they lie: a tile of the input is a box, moved by one tap at a time.

What a box reads outside of the input is zero, so there is no padding to be made and none to be masked. The columns of
the product are positions and its rows output channels: that way round both operands reach the tensor cores from
shared memory as the copy left them. A row is also one of several neighbouring outputs (NEIGHBOURS), where there are few
channels: a column is then as many positions of the input, counted by j, and the products of outputs with positions that
they do not read are with zeros.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.epilogue import epilogue


@triton.jit
def convolve_boxes_kernel(
    d_x,  # [N, D, H, W / NEIGHBOURS, NEIGHBOURS·C_PACKED], the input, by boxes [1, 1, BLOCK_H, BLOCK_J, BLOCK_K]
    d_w,  # [rows, K], the packed weight (see pack.py), by boxes [NEIGHBOURS·BLOCK_C, BLOCK_K]
    p_y,  # [N, C_OUT, S], or [N, S, C_OUT] where IS_CHANNELS_LAST, out; where STORE
    p_mean, p_m2,  # [N, C_OUT, TILES], out, where MOMENTS
    p_count,  # [N, TILES], out, where MOMENTS: a tile's outputs
    a0, a1, a2, a3, a4, a5,
    C_OUT,
    TILES,  # per sample
    TILES_H, TILES_J, D, OD, OH, OW,
    STEPS_FN: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,  # padding in front of each axis
    KD: tl.constexpr, KH: tl.constexpr,
    SPAN: tl.constexpr,  # positions that neighbouring outputs read along x: NEIGHBOURS + KW − 1
    C_PACKED: tl.constexpr, NEIGHBOURS: tl.constexpr,
    STORE: tl.constexpr,  # "no", "raw": what the convolution gives, or "done": what STEPS_FN makes of it
    MOMENTS: tl.constexpr,  # "no", "both", or "sums"
    IS_CHANNELS_LAST: tl.constexpr, USES_INT64: tl.constexpr,
    IS_EVEN_C: tl.constexpr,  # C_OUT is a multiple of BLOCK_C: one mask for all channels of a position
    BLOCKS_C: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    BLOCKS_K: tl.constexpr = C_PACKED // BLOCK_K
    STEPS_PER_SLICE: tl.constexpr = KH * SPAN * BLOCKS_K  # of one slice of taps
    unit = tl.program_id(0)
    i_b = unit % BLOCKS_C
    i_tile = (unit // BLOCKS_C) % TILES
    i_n = unit // BLOCKS_C // TILES
    j0 = i_tile % TILES_J * BLOCK_J
    y0 = i_tile // TILES_J % TILES_H * BLOCK_H
    z0 = i_tile // TILES_J // TILES_H
    # Slices of taps that lie outside of the input are left out.
    kd_first = tl.maximum(0, PD - z0)
    kd_end = tl.minimum(KD, D + PD - z0)
    acc = tl.zeros([NEIGHBOURS * BLOCK_C, BLOCK_H * BLOCK_J], ACC)
    for i in tl.range(kd_first * STEPS_PER_SLICE, kd_end * STEPS_PER_SLICE, num_stages=STAGES):
        x = i // BLOCKS_K % SPAN - PW
        y = i // (BLOCKS_K * SPAN) % KH - PH
        z = i // STEPS_PER_SLICE - PD
        j = (x + PW * NEIGHBOURS) // NEIGHBOURS - PW  # rounded down, which a quotient below 0 is not
        box = d_x.load([i_n, z0 + z, y0 + y, j0 + j, (x - j * NEIGHBOURS) * C_PACKED + i % BLOCKS_K * BLOCK_K])
        b_x = tl.reshape(box, [BLOCK_H * BLOCK_J, BLOCK_K])
        b_w = d_w.load([i_b * (NEIGHBOURS * BLOCK_C), i * BLOCK_K])  # [NEIGHBOURS·BLOCK_C, BLOCK_K]
        acc = tl.dot(b_w, b_x.T, acc, out_dtype=ACC)
    b_v = tl.permute(tl.reshape(acc, [NEIGHBOURS, BLOCK_C, BLOCK_H * BLOCK_J]), (2, 0, 1))
    b_v = tl.reshape(b_v, [BLOCK_H * BLOCK_J * NEIGHBOURS, BLOCK_C])
    o_c = i_b * BLOCK_C + tl.arange(0, BLOCK_C)
    o_p = tl.arange(0, BLOCK_H * BLOCK_J * NEIGHBOURS)
    o_x = j0 * NEIGHBOURS + o_p % (BLOCK_J * NEIGHBOURS)
    o_y = y0 + o_p // (BLOCK_J * NEIGHBOURS)
    m_s = (o_x < OW) & (o_y < OH)
    o_s = (z0 * OH + o_y) * OW + o_x
    S = OD * OH * OW
    m_c = o_c < C_OUT
    epilogue(
        b_v, o_c, m_c, o_s, m_s, i_n, i_b, i_tile, p_y, p_mean, p_m2, p_count,
        a0, a1, a2, a3, a4, a5, C_OUT, S, TILES, STEPS_FN, STORE, MOMENTS,
        IS_CHANNELS_LAST, USES_INT64, IS_EVEN_C, 0, ACC,
    )  # fmt: skip
