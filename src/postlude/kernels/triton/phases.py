"""A transposed convolution with strides as matrix products over packed operands (see pack.py), one for each phase.

Along an axis output = cell · S + remainder. Outputs of one remainder read the taps of one residue by S, and from cell
to cell the next input: a convolution of stride 1. A row of the product is a cell of the packed volume. The phases along
z and y are programs of their own; where S is 2 along x, one program computes both phases of its cells, one after the
other, and stores them as the neighbours that they are. No product is with the zeros of another phase's taps.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.epilogue import epilogue
from postlude.kernels.triton.pack import store_weights, weight_scale
from postlude.kernels.triton.planes import multiply


@triton.jit
def taps_of(residue, K: tl.constexpr, S: tl.constexpr):
    """How many of an axis's K taps have this residue by S."""
    return (K - residue + S - 1) // S


@triton.jit
def tap_at(slot, K: tl.constexpr, S: tl.constexpr):
    """The tap in a place of the packed weight, K or more where there is none: by residue, then as inputs are read."""
    MOST: tl.constexpr = (K + S - 1) // S
    residue = slot // MOST
    left = taps_of(residue, K, S) - 1 - slot % MOST
    return tl.where(left < 0, K, residue + left * S)


@triton.jit
def pack_phases_kernel(
    p_w,  # [C, COUT, taps] through its strides
    p_out,  # [columns, PLANES·K], K = slots of the three axes times CP
    p_largest,  # [C] of the input, where SCALED; where KEEPS in two planes one more
    p_unscale,  # [columns], out, where SCALED
    COUT, C, stride_o, stride_c, stride_tap,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    CP: tl.constexpr, PLANES: tl.constexpr, SCALED: tl.constexpr, KEEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_o = tl.program_id(0)
    SLOTS_Y: tl.constexpr = (KH + SH - 1) // SH * SH
    SLOTS_X: tl.constexpr = (KW + SW - 1) // SW * SW
    K: tl.constexpr = (KD + SD - 1) // SD * SD * SLOTS_Y * SLOTS_X * CP
    TAPS: tl.constexpr = KD * KH * KW
    scale = 1.0
    if SCALED:
        scale = weight_scale(p_w, p_largest, i_o, COUT, C, stride_o, stride_c, stride_tap, TAPS, 1, CP, BLOCK)
        tl.store(p_unscale + i_o, 1.0 / scale)
    for start in range(0, K, BLOCK):
        o = start + tl.arange(0, BLOCK)
        o_c = o % CP
        slot = o // CP
        kx = tap_at(slot % SLOTS_X, KW, SW)
        ky = tap_at(slot // SLOTS_X % SLOTS_Y, KH, SH)
        kz = tap_at(slot // (SLOTS_X * SLOTS_Y), KD, SD)
        m = (o_c < C) & (kx < KW) & (ky < KH) & (kz < KD) & (o < K) & (i_o < COUT)
        tap = (kz * KH + ky) * KW + kx
        b_w = tl.load(p_w + i_o * stride_o + o_c * stride_c + tap * stride_tap, mask=m, other=0.0)
        store_weights(p_out, p_largest, i_o, o, o_c, b_w, scale, C, K, PLANES, SCALED, KEEPS)


@triton.jit
def phase_of(remainder, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, FRONT: tl.constexpr):
    """Of a phase along one axis: its taps, where they begin in the packed weight, and what cell 0 reads first."""
    MOST: tl.constexpr = (K + S - 1) // S
    residue = (remainder + P) % S
    taps = taps_of(residue, K, S)
    return taps, residue * MOST, (remainder + P) // S - taps + 1 + FRONT


@triton.jit
def phase_step(i, taps_x, taps_y, slot_z, slot_y, slot_x, PITCH, PLANE, SLOTS_Y: tl.constexpr, SLOTS_X: tl.constexpr):
    """Of a phase's tap i: how many positions further on it reads, and its place in the packed weight."""
    kx = i % taps_x
    ky = i // taps_x % taps_y
    kz = i // taps_x // taps_y
    return kz * PLANE + ky * PITCH + kx, ((slot_z + kz) * SLOTS_Y + slot_y + ky) * SLOTS_X + slot_x + kx


@triton.jit
def phase_sum(
    d_high, d_low, d_w, p_inf,
    row,  # of the product's first cell, for the first tap along z and y
    column, taps_z, taps_y, slot_z, slot_y,
    i_x,  # the phase along x
    PITCH, PLANE,
    SLOTS_Y: tl.constexpr, KW: tl.constexpr, SW: tl.constexpr, PW: tl.constexpr, FW: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, PLANES: tl.constexpr, KEEPS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The sums of one phase, [BM, BC]."""
    KB: tl.constexpr = C // BK
    SLOTS_X: tl.constexpr = (KW + SW - 1) // SW * SW
    taps_x, slot_x, start_x = phase_of(i_x, KW, SW, PW, FW)
    steps = taps_z * taps_y * taps_x * KB
    taps_x, taps_y = tl.maximum(taps_x, 1), tl.maximum(taps_y, 1)  # divided by, even where there are no steps
    acc = tl.zeros([BM, BC], ACC)
    for i in tl.range(0, steps, num_stages=STAGES):
        tap, k = phase_step(i // KB, taps_x, taps_y, slot_z, slot_y, slot_x, PITCH, PLANE, SLOTS_Y, SLOTS_X)
        at = [row + start_x + tap, i % KB * BK]
        k = k * C + i % KB * BK
        high = d_high.load(at)  # [BM, BK]
        w_high = d_w.load([column, k])  # [BC, BK]
        low = d_low.load(at) if PLANES == 2 else high
        w_low = d_w.load([column, K + k]) if PLANES == 2 else w_high
        acc = multiply(high, low, w_high.T, w_low.T, acc, PLANES, ACC)
    if KEEPS and PLANES == 2:  # noqa: SIM102 (decided when compiling; the other when running)
        # An infinity times a low plane has any sign, or is NaN: the high planes alone say what becomes of it.
        if tl.load(p_inf) != 0:
            alone = tl.zeros([BM, BC], ACC)
            for i in tl.range(0, steps):
                tap, k = phase_step(i // KB, taps_x, taps_y, slot_z, slot_y, slot_x, PITCH, PLANE, SLOTS_Y, SLOTS_X)
                high = d_high.load([row + start_x + tap, i % KB * BK])
                alone = tl.dot(high, d_w.load([column, k * C + i % KB * BK]).T, alone, out_dtype=ACC)
            acc = tl.where(tl.abs(alone) < float("inf"), acc, alone)
    return acc


@triton.jit
def convolve_phases_kernel(
    d_high,  # descriptor [positions, C] over the packed input
    d_low,  # the low plane, where PLANES is 2
    d_w,  # descriptor [columns, PLANES·K]
    p_unscale,  # [COUT] where SCALED
    p_inf,  # [1] where KEEPS and PLANES is 2: whether there is an infinity in either operand
    p_y,  # [N, COUT, S], or [N, S, COUT] where LAST, out; where STORE
    p_mean, p_m2,  # [N, COUT, TILES·PHASES], out, where MOMENTS
    p_count,  # [N, TILES·PHASES], out, where MOMENTS: a tile's outputs that are none of the padding
    a0, a1, a2, a3, a4, a5,
    COUT,
    TILES,  # per sample and phase
    SAMPLE_ROWS,  # positions of a packed sample
    PITCH, PLANE, OD, OH, OW,
    BEFORE: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,  # the convolution's padding
    FD: tl.constexpr, FH: tl.constexpr, FW: tl.constexpr,  # zeros in front of the packed axes
    C: tl.constexpr,  # channels of a packed position
    PLANES: tl.constexpr, SCALED: tl.constexpr,
    KEEPS: tl.constexpr,  # infinities come out as of PyTorch's convolution: no norm follows that hides them
    STORE: tl.constexpr,  # "no", "raw": what the convolution gives, or "done": what BEFORE makes of it
    MOMENTS: tl.constexpr,  # "no", "both", or "sums"
    LAST: tl.constexpr, WIDE: tl.constexpr,
    FULL: tl.constexpr,  # COUT is a multiple of BC: one mask for all channels of a position
    BLOCKS_C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    NEIGHBOURS: tl.constexpr = 2 if SW == 2 else 1  # phases along x of one program
    PHASES: tl.constexpr = SD * SH * SW // NEIGHBOURS
    SLOTS_Y: tl.constexpr = (KH + SH - 1) // SH * SH
    K: tl.constexpr = (KD + SD - 1) // SD * SD * SLOTS_Y * ((KW + SW - 1) // SW * SW) * C
    i_b = tl.program_id(0) % BLOCKS_C
    i_phase = tl.program_id(0) // BLOCKS_C % PHASES
    i_tile = tl.program_id(0) // (BLOCKS_C * PHASES) % TILES
    i_n = tl.program_id(0) // (BLOCKS_C * PHASES) // TILES
    i_x = i_phase % (SW // NEIGHBOURS)
    i_y = i_phase // (SW // NEIGHBOURS) % SH
    i_z = i_phase // (SW // NEIGHBOURS) // SH
    taps_z, slot_z, start_z = phase_of(i_z, KD, SD, PD, FD)
    taps_y, slot_y, start_y = phase_of(i_y, KH, SH, PH, FH)
    row = i_n * SAMPLE_ROWS + i_tile * BM + start_z * PLANE + start_y * PITCH
    acc = phase_sum(
        d_high, d_low, d_w, p_inf, row, i_b * BC, taps_z, taps_y, slot_z, slot_y, i_x, PITCH, PLANE,
        SLOTS_Y, KW, SW, PW, FW, K, C, PLANES, KEEPS, BM, BC, BK, STAGES, ACC,
    )  # fmt: skip
    # A tile's last axis is the one along which the output lies side by side: so does the compiler lay out its threads.
    if NEIGHBOURS == 2:
        next_acc = phase_sum(
            d_high, d_low, d_w, p_inf, row, i_b * BC, taps_z, taps_y, slot_z, slot_y, i_x + 1, PITCH, PLANE,
            SLOTS_Y, KW, SW, PW, FW, K, C, PLANES, KEEPS, BM, BC, BK, STAGES, ACC,
        )  # fmt: skip
        both = tl.join(acc, next_acc)  # [BM, BC, 2]
        if LAST:
            b_v = tl.reshape(tl.permute(both, (0, 2, 1)), [2 * BM, BC])
        else:
            b_v = tl.reshape(tl.permute(both, (1, 0, 2)), [BC, 2 * BM])
    else:
        b_v = acc if LAST else acc.T
    AXIS: tl.constexpr = 0 if LAST else 1  # of the positions
    o_c = i_b * BC + tl.arange(0, BC)
    m_c = o_c < COUT
    if SCALED:
        b_v = b_v * tl.expand_dims(tl.load(p_unscale + o_c, mask=m_c, other=0.0), AXIS)
    o_n = tl.arange(0, BM * NEIGHBOURS)
    cell = i_tile * BM + o_n // NEIGHBOURS
    x = cell % PITCH * SW + i_x + o_n % NEIGHBOURS
    y = cell % PLANE // PITCH * SH + i_y
    z = cell // PLANE * SD + i_z
    m_s = (x < OW) & (y < OH) & (z < OD)
    o_s = (z * OH + y) * OW + x
    S = OD * OH * OW
    epilogue(
        b_v, o_c, m_c, o_s, m_s, i_n, i_b, i_tile * PHASES + i_phase, p_y, p_mean, p_m2, p_count,
        a0, a1, a2, a3, a4, a5, COUT, S, TILES * PHASES, BEFORE, STORE, MOMENTS, LAST, WIDE, FULL, AXIS, ACC,
    )  # fmt: skip
