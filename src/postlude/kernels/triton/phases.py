"""A strided transposed convolution as implicit GEMMs over packed operands (see pack.py), one GEMM for each phase.

Along an axis, output = cell · STRIDE + remainder. The outputs of one remainder (a phase) read only the taps of one
residue modulo STRIDE, and the next cell reads the next input: each phase is a convolution of stride 1, and no
multiplication is wasted on zeros. A row of a GEMM is a cell of the packed volume. Phases along z and y run in separate
programs. Where STRIDE is 2 along x, one program computes both phases of its cells, one after the other, and stores the
pairs together, because they are neighbours in the output.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.epilogue import epilogue
from postlude.kernels.triton.pack import store_weights, weight_scale
from postlude.kernels.triton.planes import multiply


@triton.jit
def taps_of(residue, KERNEL: tl.constexpr, STRIDE: tl.constexpr):
    """How many of an axis's KERNEL taps have this residue modulo STRIDE."""
    return (KERNEL - residue + STRIDE - 1) // STRIDE


@triton.jit
def tap_at(slot, KERNEL: tl.constexpr, STRIDE: tl.constexpr):
    """The tap in a slot of the packed weight; KERNEL or more means none. Ordered by residue, then by input position."""
    MOST_TAPS: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE
    residue = slot // MOST_TAPS
    left = taps_of(residue, KERNEL, STRIDE) - 1 - slot % MOST_TAPS
    return tl.where(left < 0, KERNEL, residue + left * STRIDE)


@triton.jit
def pack_phases_kernel(
    p_w,  # [C_IN, C_OUT, taps] through its strides
    p_out,  # [columns, PLANES·K], K = slots of the three axes · C_PACKED
    p_largest,  # [C_IN] of the input, where IS_SCALED; then the flag where KEEPS_INF
    p_unscale,  # [columns], out, where IS_SCALED
    C_OUT, C_IN, stride_o, stride_c, stride_tap,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    C_PACKED: tl.constexpr, PLANES: tl.constexpr, IS_SCALED: tl.constexpr, KEEPS_INF: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    i_o = tl.program_id(0)
    PADDED_KH: tl.constexpr = (KH + STRIDE_H - 1) // STRIDE_H * STRIDE_H
    PADDED_KW: tl.constexpr = (KW + STRIDE_W - 1) // STRIDE_W * STRIDE_W
    K: tl.constexpr = (KD + STRIDE_D - 1) // STRIDE_D * STRIDE_D * PADDED_KH * PADDED_KW * C_PACKED
    TAPS: tl.constexpr = KD * KH * KW
    scale = 1.0
    if IS_SCALED:
        scale = weight_scale(
            p_w, p_largest, i_o, C_OUT, C_IN, stride_o, stride_c, stride_tap, TAPS, 1, C_PACKED, BLOCK_K
        )
        tl.store(p_unscale + i_o, 1.0 / scale)
    for start in range(0, K, BLOCK_K):
        o = start + tl.arange(0, BLOCK_K)
        o_c = o % C_PACKED
        slot = o // C_PACKED
        kx = tap_at(slot % PADDED_KW, KW, STRIDE_W)
        ky = tap_at(slot // PADDED_KW % PADDED_KH, KH, STRIDE_H)
        kz = tap_at(slot // (PADDED_KW * PADDED_KH), KD, STRIDE_D)
        m = (o_c < C_IN) & (kx < KW) & (ky < KH) & (kz < KD) & (o < K) & (i_o < C_OUT)
        tap = (kz * KH + ky) * KW + kx
        b_w = tl.load(p_w + i_o * stride_o + o_c * stride_c + tap * stride_tap, mask=m, other=0.0)
        store_weights(p_out, p_largest, i_o, o, o_c, b_w, scale, C_IN, K, PLANES, IS_SCALED, KEEPS_INF)


@triton.jit
def phase_of(remainder, KERNEL: tl.constexpr, STRIDE: tl.constexpr, CROP: tl.constexpr, PAD: tl.constexpr):
    """For a phase along one axis: its number of taps, their first slot in the packed weight, and cell 0's first
    input."""
    MOST_TAPS: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE
    residue = (remainder + CROP) % STRIDE
    taps = taps_of(residue, KERNEL, STRIDE)
    return taps, residue * MOST_TAPS, (remainder + CROP) // STRIDE - taps + 1 + PAD


@triton.jit
def phase_step(
    i, taps_x, taps_y, slot_z, slot_y, slot_x, ROW_PITCH, SLICE_PITCH, PADDED_KH: tl.constexpr, PADDED_KW: tl.constexpr
):
    """For tap i of a phase: its distance in packed positions, and its slot in the packed weight."""
    kx = i % taps_x
    ky = i // taps_x % taps_y
    kz = i // taps_x // taps_y
    return kz * SLICE_PITCH + ky * ROW_PITCH + kx, ((slot_z + kz) * PADDED_KH + slot_y + ky) * PADDED_KW + slot_x + kx


@triton.jit
def phase_sum(
    d_x, d_x_low, d_w, p_inf,
    row,  # of the tile's first cell, for the first tap along z and y
    column, taps_z, taps_y, slot_z, slot_y,
    i_x,  # the phase along x
    ROW_PITCH, SLICE_PITCH,
    PADDED_KH: tl.constexpr, KW: tl.constexpr, STRIDE_W: tl.constexpr, CROP_W: tl.constexpr, PW: tl.constexpr,
    K: tl.constexpr, C_PACKED: tl.constexpr, PLANES: tl.constexpr, KEEPS_INF: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The accumulator of one phase, [BLOCK_M, BLOCK_C]."""
    BLOCKS_K: tl.constexpr = C_PACKED // BLOCK_K
    PADDED_KW: tl.constexpr = (KW + STRIDE_W - 1) // STRIDE_W * STRIDE_W
    taps_x, slot_x, start_x = phase_of(i_x, KW, STRIDE_W, CROP_W, PW)
    steps = taps_z * taps_y * taps_x * BLOCKS_K
    taps_x, taps_y = tl.maximum(taps_x, 1), tl.maximum(taps_y, 1)  # they are divisors, even if the loop has no steps
    acc = tl.zeros([BLOCK_M, BLOCK_C], ACC)
    for i in tl.range(0, steps, num_stages=STAGES):
        tap, k = phase_step(
            i // BLOCKS_K, taps_x, taps_y, slot_z, slot_y, slot_x, ROW_PITCH, SLICE_PITCH, PADDED_KH, PADDED_KW
        )
        at = [row + start_x + tap, i % BLOCKS_K * BLOCK_K]
        k = k * C_PACKED + i % BLOCKS_K * BLOCK_K
        high = d_x.load(at)  # [BLOCK_M, BLOCK_K]
        w_high = d_w.load([column, k])  # [BLOCK_C, BLOCK_K]
        low = d_x_low.load(at) if PLANES == 2 else high
        w_low = d_w.load([column, K + k]) if PLANES == 2 else w_high
        acc = multiply(high, low, w_high.T, w_low.T, acc, PLANES, ACC)
    if KEEPS_INF and PLANES == 2:  # noqa: SIM102 (decided when compiling; the other when running)
        # An infinity times a low plane has an arbitrary sign or is NaN. The product of the high planes alone is right.
        if tl.load(p_inf) != 0:
            alone = tl.zeros([BLOCK_M, BLOCK_C], ACC)
            for i in tl.range(0, steps):
                tap, k = phase_step(
                    i // BLOCKS_K, taps_x, taps_y, slot_z, slot_y, slot_x, ROW_PITCH, SLICE_PITCH, PADDED_KH, PADDED_KW
                )
                high = d_x.load([row + start_x + tap, i % BLOCKS_K * BLOCK_K])
                alone = tl.dot(high, d_w.load([column, k * C_PACKED + i % BLOCKS_K * BLOCK_K]).T, alone, out_dtype=ACC)
            acc = tl.where(tl.abs(alone) < float("inf"), acc, alone)
    return acc


@triton.jit
def convolve_phases_kernel(
    d_x,  # descriptor [positions, C_PACKED] over the packed input
    d_x_low,  # the low plane, where PLANES is 2
    d_w,  # descriptor [columns, PLANES·K]
    p_unscale,  # [C_OUT] where IS_SCALED
    p_inf,  # [1] where KEEPS_INF and PLANES is 2: whether either operand holds an infinity
    p_y,  # [N, C_OUT, S], or [N, S, C_OUT] where IS_CHANNELS_LAST, out; where STORE
    p_mean, p_m2,  # [N, C_OUT, TILES·PHASES], out, where MOMENTS
    p_count,  # [N, TILES·PHASES], out, where MOMENTS: how many of a tile's outputs are not padding
    a0, a1, a2, a3, a4, a5,
    C_OUT,
    TILES,  # per sample and phase
    M_PER_SAMPLE,  # rows of the left operand from one sample to the next: positions
    ROW_PITCH, SLICE_PITCH, OD, OH, OW,
    STEPS_FN: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    CROP_D: tl.constexpr, CROP_H: tl.constexpr, CROP_W: tl.constexpr,  # the convolution's padding: it crops the output
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,  # zeros in front of the packed axes
    C_PACKED: tl.constexpr,  # channels of a packed position
    PLANES: tl.constexpr, IS_SCALED: tl.constexpr,
    KEEPS_INF: tl.constexpr,  # infinities give what PyTorch's convolution gives; needed unless a norm follows
    STORE: tl.constexpr,  # "no", "raw": the convolution's result, or "done": after STEPS_FN
    MOMENTS: tl.constexpr,  # "no", "both", or "sums"
    IS_CHANNELS_LAST: tl.constexpr, USES_INT64: tl.constexpr,
    IS_EVEN_C: tl.constexpr,  # C_OUT is a multiple of BLOCK_C: one mask for all channels of a position
    BLOCKS_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    PHASES_X: tl.constexpr = 2 if STRIDE_W == 2 else 1  # phases along x in one program
    PHASES: tl.constexpr = STRIDE_D * STRIDE_H * STRIDE_W // PHASES_X
    PADDED_KH: tl.constexpr = (KH + STRIDE_H - 1) // STRIDE_H * STRIDE_H
    K: tl.constexpr = (
        (KD + STRIDE_D - 1) // STRIDE_D * STRIDE_D * PADDED_KH * ((KW + STRIDE_W - 1) // STRIDE_W * STRIDE_W) * C_PACKED
    )
    i_b = tl.program_id(0) % BLOCKS_C
    i_phase = tl.program_id(0) // BLOCKS_C % PHASES
    i_tile = tl.program_id(0) // (BLOCKS_C * PHASES) % TILES
    i_n = tl.program_id(0) // (BLOCKS_C * PHASES) // TILES
    i_x = i_phase % (STRIDE_W // PHASES_X)
    i_y = i_phase // (STRIDE_W // PHASES_X) % STRIDE_H
    i_z = i_phase // (STRIDE_W // PHASES_X) // STRIDE_H
    taps_z, slot_z, start_z = phase_of(i_z, KD, STRIDE_D, CROP_D, PD)
    taps_y, slot_y, start_y = phase_of(i_y, KH, STRIDE_H, CROP_H, PH)
    row = i_n * M_PER_SAMPLE + i_tile * BLOCK_M + start_z * SLICE_PITCH + start_y * ROW_PITCH
    acc = phase_sum(
        d_x, d_x_low, d_w, p_inf, row, i_b * BLOCK_C, taps_z, taps_y, slot_z, slot_y, i_x,
        ROW_PITCH, SLICE_PITCH, PADDED_KH, KW, STRIDE_W, CROP_W, PW, K, C_PACKED, PLANES, KEEPS_INF,
        BLOCK_M, BLOCK_C, BLOCK_K, STAGES, ACC,
    )  # fmt: skip
    # The tile's last axis must be the one that is contiguous in the output: the compiler lays out threads along it.
    if PHASES_X == 2:
        next_acc = phase_sum(
            d_x, d_x_low, d_w, p_inf, row, i_b * BLOCK_C, taps_z, taps_y, slot_z, slot_y, i_x + 1,
            ROW_PITCH, SLICE_PITCH, PADDED_KH, KW, STRIDE_W, CROP_W, PW, K, C_PACKED, PLANES, KEEPS_INF,
            BLOCK_M, BLOCK_C, BLOCK_K, STAGES, ACC,
        )  # fmt: skip
        both = tl.join(acc, next_acc)  # [BLOCK_M, BLOCK_C, 2]
        if IS_CHANNELS_LAST:
            b_v = tl.reshape(tl.permute(both, (0, 2, 1)), [2 * BLOCK_M, BLOCK_C])
        else:
            b_v = tl.reshape(tl.permute(both, (1, 0, 2)), [BLOCK_C, 2 * BLOCK_M])
    else:
        b_v = acc if IS_CHANNELS_LAST else acc.T
    POSITION_AXIS: tl.constexpr = 0 if IS_CHANNELS_LAST else 1
    o_c = i_b * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C_OUT
    if IS_SCALED:
        b_v = b_v * tl.expand_dims(tl.load(p_unscale + o_c, mask=m_c, other=0.0), POSITION_AXIS)
    o_n = tl.arange(0, BLOCK_M * PHASES_X)
    cell = i_tile * BLOCK_M + o_n // PHASES_X
    x = cell % ROW_PITCH * STRIDE_W + i_x + o_n % PHASES_X
    y = cell % SLICE_PITCH // ROW_PITCH * STRIDE_H + i_y
    z = cell // SLICE_PITCH * STRIDE_D + i_z
    m_s = (x < OW) & (y < OH) & (z < OD)
    o_s = (z * OH + y) * OW + x
    S = OD * OH * OW
    epilogue(
        b_v, o_c, m_c, o_s, m_s, i_n, i_b, i_tile * PHASES + i_phase, p_y, p_mean, p_m2, p_count,
        a0, a1, a2, a3, a4, a5, C_OUT, S, TILES * PHASES, STEPS_FN, STORE, MOMENTS,
        IS_CHANNELS_LAST, USES_INT64, IS_EVEN_C, POSITION_AXIS, ACC,
    )  # fmt: skip
