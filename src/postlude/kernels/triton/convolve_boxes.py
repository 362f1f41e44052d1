"""An implicit GEMM that reads a channels-last input in place: a TMA box per tile, shifted by one tap at a time.

TMA fills with zeros what a box reads outside the input, so nothing is padded or masked. The columns of the GEMM are
positions and its rows are output channels: in this order the tensor cores take both operands from shared memory as the
copy left them. With few channels a row stands for one of NEIGHBOURS neighbouring outputs as well, and a column for
NEIGHBOURS positions of the input (index j). Weights are zero where an output does not read a position.
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
    STORE: tl.constexpr,  # "no", "raw": the convolution's result, or "done": after STEPS_FN
    MOMENTS: tl.constexpr,  # "no", "both", or "sums"
    IS_CHANNELS_LAST: tl.constexpr, USES_INT64: tl.constexpr,
    IS_EVEN_C: tl.constexpr,  # C_OUT is a multiple of BLOCK_C: one mask for all channels of a position
    BLOCKS_C: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    BLOCKS_K: tl.constexpr = C_PACKED // BLOCK_K
    STEPS_PER_SLICE: tl.constexpr = KH * SPAN * BLOCKS_K  # for the taps of one z
    unit = tl.program_id(0)
    i_b = unit % BLOCKS_C
    i_tile = (unit // BLOCKS_C) % TILES
    i_n = unit // BLOCKS_C // TILES
    j0 = i_tile % TILES_J * BLOCK_J
    y0 = i_tile // TILES_J % TILES_H * BLOCK_H
    z0 = i_tile // TILES_J // TILES_H
    # Skip taps along z that read only padding.
    kd_first = tl.maximum(0, PD - z0)
    kd_end = tl.minimum(KD, D + PD - z0)
    acc = tl.zeros([NEIGHBOURS * BLOCK_C, BLOCK_H * BLOCK_J], ACC)
    for i in tl.range(kd_first * STEPS_PER_SLICE, kd_end * STEPS_PER_SLICE, num_stages=STAGES):
        x = i // BLOCKS_K % SPAN - PW
        y = i // (BLOCKS_K * SPAN) % KH - PH
        z = i // STEPS_PER_SLICE - PD
        j = (x + PW * NEIGHBOURS) // NEIGHBOURS - PW  # floor division; `//` alone rounds a negative x towards 0
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
