"""A convolution as one matrix product over packed operands (see pack.py), with what follows it in the same launch.

A row of the product is WIDTH neighbouring outputs, its columns their channels. For one (z, y) of the kernel's taps the
WIDTH + KW − 1 positions that they read lie next to one another: a stretch of one packed row, so a tile of the left
operand is one 2-D descriptor load, with nothing to mask. With few channels a WIDTH above 1 reads each input fewer
times, at the price of products with zeros.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.epilogue import epilogue
from postlude.kernels.triton.planes import multiply


@triton.jit
def convolve_kernel(
    d_high,  # descriptor [rows, columns] over the packed input; rows overlap where WIDTH > 1
    d_low,  # the low plane, where PLANES is 2
    d_w,  # descriptor [columns, PLANES·K]
    p_unscale,  # [COUT] where SCALED
    p_inf,  # [1] where KEEPS and PLANES is 2: whether there is an infinity in either operand
    p_y,  # [N, COUT, S], or [N, S, COUT] where LAST, out; where STORE
    p_mean, p_m2,  # [N, COUT, TILES], out, where MOMENTS
    p_count,  # [N, TILES], out, where MOMENTS: a tile's outputs that are none of the padding
    a0, a1, a2, a3, a4, a5,
    COUT,
    TILES,  # per sample
    UNITS,  # tiles in all, times blocks of channels
    SAMPLE_ROWS,  # rows of a packed sample
    PITCH, PLANE,  # positions of a packed row, and of a packed plane
    FIRST,  # the first plane of the packed sample that holds input
    LAST_PLANE,  # the last plane that holds input
    OD, OH, OW,
    BEFORE: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr,
    SPAN_C: tl.constexpr,  # elements that a row of the product reads for one (z, y) of the taps
    C: tl.constexpr,  # channels of a packed position
    WIDTH: tl.constexpr, PLANES: tl.constexpr, SCALED: tl.constexpr,
    KEEPS: tl.constexpr,  # infinities come out as of PyTorch's convolution: no norm follows that hides them
    STORE: tl.constexpr,  # "no", "raw": what the convolution gives, or "done": what BEFORE makes of it
    MOMENTS: tl.constexpr,  # "no", "both", or "sums"
    LAST: tl.constexpr,
    DENSE: tl.constexpr,  # the packed volume is the output's, so a position's number is its place in the output
    WIDE: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides OD·OH·OW where DENSE, else PITCH and OW
    FULL: tl.constexpr,  # COUT is a multiple of BC: one mask for all channels of a position
    BLOCKS_C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    KB: tl.constexpr = SPAN_C // BK
    K: tl.constexpr = KD * KH * SPAN_C
    for unit in range(tl.program_id(0), UNITS, tl.num_programs(0)):
        i_b = unit % BLOCKS_C
        i_tile = (unit // BLOCKS_C) % TILES
        i_n = unit // BLOCKS_C // TILES
        s0 = i_tile * (BM * WIDTH)
        row0 = i_n * SAMPLE_ROWS + i_tile * BM
        column0 = i_b * (WIDTH * BC)
        # Taps that meet only the padding in front of or behind the volume are left out.
        z_last = tl.minimum(s0 + BM * WIDTH - 1, OD * PLANE - 1) // PLANE
        kd_first = tl.maximum(0, FIRST - z_last)
        kd_end = tl.minimum(KD, LAST_PLANE + 1 - s0 // PLANE)
        acc = tl.zeros([BM, WIDTH * BC], ACC)
        for i in tl.range(kd_first * (KH * KB), kd_end * (KH * KB), num_stages=STAGES):
            i_zy = i // KB
            offset = (i_zy // KH) * PLANE + (i_zy % KH) * PITCH
            row = row0 + offset // WIDTH
            column = (offset % WIDTH) * C + (i % KB) * BK
            high = d_high.load([row, column])  # [BM, BK]
            w_high = d_w.load([column0, i * BK])  # [WIDTH·BC, BK]
            low = d_low.load([row, column]) if PLANES == 2 else high
            w_low = d_w.load([column0, K + i * BK]) if PLANES == 2 else w_high
            acc = multiply(high, low, w_high.T, w_low.T, acc, PLANES, ACC)
        if KEEPS and PLANES == 2:  # noqa: SIM102 (decided when compiling; the other when running)
            # An infinity times a low plane has any sign, or is NaN: the high planes alone say what becomes of it.
            if tl.load(p_inf) != 0:
                alone = tl.zeros([BM, WIDTH * BC], ACC)
                for i in tl.range(kd_first * (KH * KB), kd_end * (KH * KB)):
                    row = row0 + (i // KB // KH) * PLANE + (i // KB % KH) * PITCH  # WIDTH is 1 where KEEPS
                    high = d_high.load([row, (i % KB) * BK])
                    alone = tl.dot(high, d_w.load([column0, i * BK]).T, alone, out_dtype=ACC)
                acc = tl.where(tl.abs(alone) < float("inf"), acc, alone)
        b_v = tl.reshape(acc, [BM * WIDTH, BC])
        o_c = i_b * BC + tl.arange(0, BC)
        m_c = o_c < COUT
        if SCALED:
            b_v = b_v * tl.load(p_unscale + o_c, mask=m_c, other=0.0)[None, :]
        o_p = s0 + tl.arange(0, BM * WIDTH)
        o_s = o_p
        S = OD * OH * OW // ALIGN * ALIGN  # the same number, seen to be a multiple: stores are as wide as that
        m_s = o_p < S
        if not DENSE:
            # By runs of ALIGN positions, so that the compiler sees that they lie side by side and are masked together.
            run = o_p // ALIGN
            x = run % (PITCH // ALIGN)
            y = run % (PLANE // ALIGN) // (PITCH // ALIGN)
            m_s = (run < OD * (PLANE // ALIGN)) & (x < OW // ALIGN) & (y < OH)
            o_s = ((run // (PLANE // ALIGN) * OH + y) * (OW // ALIGN) + x) * ALIGN + o_p % ALIGN
        epilogue(
            b_v, o_c, m_c, o_s, m_s, i_n, i_b, i_tile, p_y, p_mean, p_m2, p_count,
            a0, a1, a2, a3, a4, a5, COUT, S, TILES, BEFORE, STORE, MOMENTS, LAST, WIDE, FULL, 0, ACC,
        )  # fmt: skip
