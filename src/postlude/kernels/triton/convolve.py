"""A convolution as an implicit GEMM over packed operands (see pack.py), with an epilogue for what follows it.

A row of the GEMM is one output position, or NEIGHBOURS neighbouring ones; its columns are output channels. For one
(z, y) of the taps, the NEIGHBOURS + KW − 1 input positions that a row reads are consecutive in one packed row. A tile
of the left operand is therefore one 2-D descriptor load, with nothing to mask. With few channels, NEIGHBOURS > 1 reads
each input fewer times, at the price of multiplications with zeros.

With strides the input is packed by residue (see residues.py) and NEIGHBOURS is 1; a tap is then a shifted read too.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.epilogue import epilogue
from postlude.kernels.triton.planes import multiply
from postlude.kernels.triton.residues import strided_step


@triton.jit
def convolve_kernel(
    d_x,  # descriptor [rows, columns] over the packed input; rows overlap where NEIGHBOURS > 1
    d_x_low,  # the low plane, where PLANES is 2
    d_w,  # descriptor [columns, PLANES·K]
    p_unscale,  # [C_OUT] where IS_SCALED
    p_inf,  # [1] where KEEPS_INF and PLANES is 2: whether either operand holds an infinity
    p_y,  # [N, C_OUT, S], or [N, S, C_OUT] where IS_CHANNELS_LAST, out; where STORE
    p_mean, p_m2,  # [N, C_OUT, TILES], out, where MOMENTS
    p_count,  # [N, TILES], out, where MOMENTS: how many of a tile's outputs are not padding
    a0, a1, a2, a3, a4, a5,
    C_OUT,
    TILES,  # per sample
    UNITS,  # tiles in all, times the blocks of channels
    M_PER_SAMPLE,  # rows of the left operand from one sample to the next
    ROW_PITCH, SLICE_PITCH,  # positions of a packed row, and of a packed slice
    RESIDUE_PITCH,  # positions of one residue's volume, all samples, where there are strides
    FIRST_SLICE,  # the first slice of the packed sample that holds input
    LAST_SLICE,  # the last slice that holds input
    OD, OH, OW,
    STEPS_FN: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    K_PER_TAP_ROW: tl.constexpr,  # elements that a row of the GEMM reads for one (z, y) of the taps: SPAN·C_PACKED
    C_PACKED: tl.constexpr,  # channels of a packed position
    NEIGHBOURS: tl.constexpr, PLANES: tl.constexpr, IS_SCALED: tl.constexpr,
    KEEPS_INF: tl.constexpr,  # infinities give what PyTorch's convolution gives; needed unless a norm follows
    STORE: tl.constexpr,  # "no", "raw": the convolution's result, or "done": after STEPS_FN
    MOMENTS: tl.constexpr,  # "no", "both", or "sums"
    IS_CHANNELS_LAST: tl.constexpr,
    IS_DENSE: tl.constexpr,  # the packed volume has the output's shape, so a packed position is an output position
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
        # Skip taps along z that read only padding.
        z_last = tl.minimum(s0 + BLOCK_M * NEIGHBOURS - 1, OD * SLICE_PITCH - 1) // SLICE_PITCH
        kd_first = tl.maximum(0, FIRST_SLICE - z_last)
        kd_end = tl.minimum(KD, LAST_SLICE + 1 - s0 // SLICE_PITCH)
        acc = tl.zeros([BLOCK_M, NEIGHBOURS * BLOCK_C], ACC)
        for i in tl.range(kd_first * (KH * BLOCKS_K), kd_end * (KH * BLOCKS_K), num_stages=STAGES):
            if STRIDE_D * STRIDE_H * STRIDE_W > 1:
                row, column, k = strided_step(
                    i, ROW_PITCH, SLICE_PITCH, RESIDUE_PITCH, KD, KH, KW, STRIDE_D, STRIDE_H, STRIDE_W,
                    C_PACKED, BLOCK_K,
                )  # fmt: skip
                high = d_x.load([row0 + row, column])  # [BLOCK_M, BLOCK_K]
                w_high = d_w.load([column0, k])  # [BLOCK_C, BLOCK_K]
                low = d_x_low.load([row0 + row, column]) if PLANES == 2 else high
                w_low = d_w.load([column0, K + k]) if PLANES == 2 else w_high
            else:
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
            # An infinity times a low plane has an arbitrary sign or is NaN. The product of the high planes alone is
            # right.
            if tl.load(p_inf) != 0:
                alone = tl.zeros([BLOCK_M, NEIGHBOURS * BLOCK_C], ACC)
                for i in tl.range(kd_first * (KH * BLOCKS_K), kd_end * (KH * BLOCKS_K)):
                    if STRIDE_D * STRIDE_H * STRIDE_W > 1:
                        row, column, k = strided_step(
                            i, ROW_PITCH, SLICE_PITCH, RESIDUE_PITCH, KD, KH, KW, STRIDE_D, STRIDE_H, STRIDE_W,
                            C_PACKED, BLOCK_K,
                        )  # fmt: skip
                        high = d_x.load([row0 + row, column])
                        alone = tl.dot(high, d_w.load([column0, k]).T, alone, out_dtype=ACC)
                    else:
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
        S = OD * OH * OW // ALIGN * ALIGN  # same value; the compiler sees the alignment and widens the stores
        m_s = o_p < S
        if not IS_DENSE:
            # By runs of ALIGN positions: the compiler then sees that a run is contiguous and shares one mask.
            run = o_p // ALIGN
            x = run % (ROW_PITCH // ALIGN)
            y = run % (SLICE_PITCH // ALIGN) // (ROW_PITCH // ALIGN)
            m_s = (run < OD * (SLICE_PITCH // ALIGN)) & (x < OW // ALIGN) & (y < OH)
            o_s = ((run // (SLICE_PITCH // ALIGN) * OH + y) * (OW // ALIGN) + x) * ALIGN + o_p % ALIGN
            if ALIGN == 1:
                # The compiler sees no run. Triton 3.6 puts neighbouring lanes on neighbouring positions all the same,
                # but 3.7 to 3.9 on neighbouring channels, S apart. Positions are side by side wherever m_s is true.
                o_s = tl.max_contiguous((run // SLICE_PITCH * OH + y) * OW + x, 2)
        epilogue(
            b_v, o_c, m_c, o_s, m_s, i_n, i_b, i_tile, p_y, p_mean, p_m2, p_count,
            a0, a1, a2, a3, a4, a5, C_OUT, S, TILES, STEPS_FN, STORE, MOMENTS,
            IS_CHANNELS_LAST, USES_INT64, IS_EVEN_C, 0, ACC,
        )  # fmt: skip
