"""A convolution as one matrix product over packed operands (see pack.py), with what follows it in the same launch.

A row of the product is one output or several neighbouring ones (NEIGHBOURS), its columns their channels. For one (z, y)
of the kernel's taps the NEIGHBOURS + KW − 1 positions that they read lie next to one another: a stretch of one packed
row, so a tile of the left operand is one 2-D descriptor load, with nothing to mask. With few channels several
neighbours read each input fewer times, at the price of products with zeros.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.epilogue import epilogue
from postlude.kernels.triton.planes import multiply


@triton.jit
def convolve_kernel(
    d_x,  # descriptor [rows, columns] over the packed input; rows overlap where NEIGHBOURS > 1
    d_x_low,  # the low plane, where PLANES is 2
    d_w,  # descriptor [columns, PLANES·K]
    p_unscale,  # [C_OUT] where IS_SCALED
    p_inf,  # [1] where KEEPS_INF and PLANES is 2: whether there is an infinity in either operand
    p_y,  # [N, C_OUT, S], or [N, S, C_OUT] where IS_CHANNELS_LAST, out; where STORE
    p_mean, p_m2,  # [N, C_OUT, TILES], out, where MOMENTS
    p_count,  # [N, TILES], out, where MOMENTS: a tile's outputs that are none of the padding
    a0, a1, a2, a3, a4, a5,
    C_OUT,
    TILES,  # per sample
    UNITS,  # tiles in all, times blocks of channels
    M_PER_SAMPLE,  # rows of the left operand from one sample to the next
    ROW_PITCH, SLICE_PITCH,  # positions of a packed row, and of a packed slice
    FIRST_SLICE,  # the first slice of the packed sample that holds input
    LAST_SLICE,  # the last slice that holds input
    OD, OH, OW,
    STEPS_FN: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr,
    K_PER_TAP_ROW: tl.constexpr,  # elements that a row of the product reads for one (z, y) of the taps: SPAN·C_PACKED
    C_PACKED: tl.constexpr,  # channels of a packed position
    NEIGHBOURS: tl.constexpr, PLANES: tl.constexpr, IS_SCALED: tl.constexpr,
    KEEPS_INF: tl.constexpr,  # infinities come out as of PyTorch's convolution: no norm follows that hides them
    STORE: tl.constexpr,  # "no", "raw": what the convolution gives, or "done": what STEPS_FN makes of it
    MOMENTS: tl.constexpr,  # "no", "both", or "sums"
    IS_CHANNELS_LAST: tl.constexpr,
    IS_DENSE: tl.constexpr,  # the packed volume is the output's, so a position's number is its place in the output
    USES_INT64: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides OD·OH·OW where IS_DENSE, else ROW_PITCH and OW
    IS_EVEN_C: tl.constexpr,  # C_OUT is a multiple of BLOCK_C: one mask for all channels of a position
    BLOCKS_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    BLOCKS_K: tl.constexpr = K_PER_TAP_ROW // BLOCK_K
    K: tl.constexpr = KD * KH * K_PER_TAP_ROW
    for unit in range(tl.program_id(0), UNITS, tl.num_programs(0)):
        i_b = unit % BLOCKS_C
        i_tile = (unit // BLOCKS_C) % TILES
        i_n = unit // BLOCKS_C // TILES
        s0 = i_tile * (BLOCK_M * NEIGHBOURS)
        row0 = i_n * M_PER_SAMPLE + i_tile * BLOCK_M
        column0 = i_b * (NEIGHBOURS * BLOCK_C)
        # Taps that meet only the padding in front of or behind the volume are left out.
        z_last = tl.minimum(s0 + BLOCK_M * NEIGHBOURS - 1, OD * SLICE_PITCH - 1) // SLICE_PITCH
        kd_first = tl.maximum(0, FIRST_SLICE - z_last)
        kd_end = tl.minimum(KD, LAST_SLICE + 1 - s0 // SLICE_PITCH)
        acc = tl.zeros([BLOCK_M, NEIGHBOURS * BLOCK_C], ACC)
        for i in tl.range(kd_first * (KH * BLOCKS_K), kd_end * (KH * BLOCKS_K), num_stages=STAGES):
            i_zy = i // BLOCKS_K
            offset = (i_zy // KH) * SLICE_PITCH + (i_zy % KH) * ROW_PITCH
            row = row0 + offset // NEIGHBOURS
            column = (offset % NEIGHBOURS) * C_PACKED + (i % BLOCKS_K) * BLOCK_K
            high = d_x.load([row, column])  # [BLOCK_M, BLOCK_K]
            w_high = d_w.load([column0, i * BLOCK_K])  # [NEIGHBOURS·BLOCK_C, BLOCK_K]
            low = d_x_low.load([row, column]) if PLANES == 2 else high
            w_low = d_w.load([column0, K + i * BLOCK_K]) if PLANES == 2 else w_high
            acc = multiply(high, low, w_high.T, w_low.T, acc, PLANES, ACC)
        if KEEPS_INF and PLANES == 2:  # noqa: SIM102 (decided when compiling; the other when running)
            # An infinity times a low plane has any sign, or is NaN: the high planes alone say what becomes of it.
            if tl.load(p_inf) != 0:
                alone = tl.zeros([BLOCK_M, NEIGHBOURS * BLOCK_C], ACC)
                for i in tl.range(kd_first * (KH * BLOCKS_K), kd_end * (KH * BLOCKS_K)):
                    # NEIGHBOURS is 1 where KEEPS_INF.
                    row = row0 + (i // BLOCKS_K // KH) * SLICE_PITCH + (i // BLOCKS_K % KH) * ROW_PITCH
                    high = d_x.load([row, (i % BLOCKS_K) * BLOCK_K])
                    alone = tl.dot(high, d_w.load([column0, i * BLOCK_K]).T, alone, out_dtype=ACC)
                acc = tl.where(tl.abs(alone) < float("inf"), acc, alone)
        b_v = tl.reshape(acc, [BLOCK_M * NEIGHBOURS, BLOCK_C])
        o_c = i_b * BLOCK_C + tl.arange(0, BLOCK_C)
        m_c = o_c < C_OUT
        if IS_SCALED:
            b_v = b_v * tl.load(p_unscale + o_c, mask=m_c, other=0.0)[None, :]
        o_p = s0 + tl.arange(0, BLOCK_M * NEIGHBOURS)
        o_s = o_p
        S = OD * OH * OW // ALIGN * ALIGN  # the same number, seen to be a multiple: stores are as wide as that
        m_s = o_p < S
        if not IS_DENSE:
            # By runs of ALIGN positions, so that the compiler sees that they lie side by side and are masked together.
            run = o_p // ALIGN
            x = run % (ROW_PITCH // ALIGN)
            y = run % (SLICE_PITCH // ALIGN) // (ROW_PITCH // ALIGN)
            m_s = (run < OD * (SLICE_PITCH // ALIGN)) & (x < OW // ALIGN) & (y < OH)
            o_s = ((run // (SLICE_PITCH // ALIGN) * OH + y) * (OW // ALIGN) + x) * ALIGN + o_p % ALIGN
        epilogue(
            b_v, o_c, m_c, o_s, m_s, i_n, i_b, i_tile, p_y, p_mean, p_m2, p_count,
            a0, a1, a2, a3, a4, a5, C_OUT, S, TILES, STEPS_FN, STORE, MOMENTS,
            IS_CHANNELS_LAST, USES_INT64, IS_EVEN_C, 0, ACC,
        )  # fmt: skip
