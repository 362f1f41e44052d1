"""A convolution that reads rows of channels where they lie: a tile of the input is a box, moved by one tap at a time.

What a box reads outside of the input is zero, so there is no padding to be made and none to be masked. The columns of
the product are positions and its rows output channels: that way round both operands reach the tensor cores from
shared memory as the copy left them. A row is also one of WIDTH neighbouring outputs, where there are few channels: a
column is then WIDTH positions of the input, and the products of outputs with positions that they do not read are with
zeros.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.epilogue import epilogue


@triton.jit
def convolve_boxes_kernel(
    d_x,  # descriptor [N, D, H, W / WIDTH, WIDTH·C] over the input, boxes [1, 1, BH, BJ, BK]
    d_w,  # descriptor [rows, K] over the packed weight (see pack.py), boxes [WIDTH·BC, BK]
    p_y,  # [N, COUT, S], or [N, S, COUT] where LAST, out; where STORE
    p_mean, p_m2,  # [N, COUT, TILES], out, where MOMENTS
    p_count,  # [N, TILES], out, where MOMENTS: a tile's outputs
    a0, a1, a2, a3, a4, a5,
    COUT,
    TILES,  # per sample
    TILES_H, TILES_J, D, OD, OH, OW,
    BEFORE: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,  # padding in front of each axis
    KD: tl.constexpr, KH: tl.constexpr,
    SPAN: tl.constexpr,  # positions that WIDTH neighbouring outputs read along x
    C: tl.constexpr, WIDTH: tl.constexpr,
    STORE: tl.constexpr,  # "no", "raw": what the convolution gives, or "done": what BEFORE makes of it
    MOMENTS: tl.constexpr,  # "no", "both", or "sums"
    LAST: tl.constexpr, WIDE: tl.constexpr,
    FULL: tl.constexpr,  # COUT is a multiple of BC: one mask for all channels of a position
    BLOCKS_C: tl.constexpr, BH: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    KB: tl.constexpr = C // BK
    STEPS: tl.constexpr = KH * SPAN * KB  # of one plane of taps
    unit = tl.program_id(0)
    i_b = unit % BLOCKS_C
    i_tile = (unit // BLOCKS_C) % TILES
    i_n = unit // BLOCKS_C // TILES
    j0 = i_tile % TILES_J * BJ
    y0 = i_tile // TILES_J % TILES_H * BH
    z0 = i_tile // TILES_J // TILES_H
    # Planes of taps that lie outside of the input are left out.
    kd_first = tl.maximum(0, PD - z0)
    kd_end = tl.minimum(KD, D + PD - z0)
    acc = tl.zeros([WIDTH * BC, BH * BJ], ACC)
    for i in tl.range(kd_first * STEPS, kd_end * STEPS, num_stages=STAGES):
        x = i // KB % SPAN - PW
        y = i // (KB * SPAN) % KH - PH
        z = i // STEPS - PD
        j = (x + PW * WIDTH) // WIDTH - PW  # rounded down, which a quotient below 0 is not
        box = d_x.load([i_n, z0 + z, y0 + y, j0 + j, (x - j * WIDTH) * C + i % KB * BK])
        b_x = tl.reshape(box, [BH * BJ, BK])
        b_w = d_w.load([i_b * (WIDTH * BC), i * BK])  # [WIDTH·BC, BK]
        acc = tl.dot(b_w, b_x.T, acc, out_dtype=ACC)
    b_v = tl.permute(tl.reshape(acc, [WIDTH, BC, BH * BJ]), (2, 0, 1))
    b_v = tl.reshape(b_v, [BH * BJ * WIDTH, BC])
    o_c = i_b * BC + tl.arange(0, BC)
    o_p = tl.arange(0, BH * BJ * WIDTH)
    o_x = j0 * WIDTH + o_p % (BJ * WIDTH)
    o_y = y0 + o_p // (BJ * WIDTH)
    m_s = (o_x < OW) & (o_y < OH)
    o_s = (z0 * OH + o_y) * OW + o_x
    S = OD * OH * OW
    m_c = o_c < COUT
    epilogue(
        b_v, o_c, m_c, o_s, m_s, i_n, i_b, i_tile, p_y, p_mean, p_m2, p_count,
        a0, a1, a2, a3, a4, a5, COUT, S, TILES, BEFORE, STORE, MOMENTS, LAST, WIDE, FULL, 0, ACC,
    )  # fmt: skip
