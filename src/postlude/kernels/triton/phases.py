"""A transposed convolution with strides as matrix products over packed operands (see pack.py), one for each phase.

Along an axis output = cell · S + remainder. Outputs of one remainder read the taps of one residue by S, and from cell
to cell the next input: a convolution of stride 1. A row of the product is a cell of the packed volume. The phases along
z and y are programs of their own; where S is 2 along x, one program computes both phases of its cells, one after the
other, and stores them as the neighbours that they are. No product is with the zeros of another phase's taps.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.pack import finite_magnitude, flag_infinity, not_zero, rest_of, scale_for


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
    COUT,
    C,
    stride_o,
    stride_c,
    stride_tap,
    KD: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SD: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    CP: tl.constexpr,
    PLANES: tl.constexpr,
    SCALED: tl.constexpr,
    KEEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_o = tl.program_id(0)
    SLOTS_Y: tl.constexpr = (KH + SH - 1) // SH * SH
    SLOTS_X: tl.constexpr = (KW + SW - 1) // SW * SW
    K: tl.constexpr = (KD + SD - 1) // SD * SD * SLOTS_Y * SLOTS_X * CP
    p_w += i_o * stride_o
    scale = 1.0
    if SCALED:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, KD * KH * KW * CP, BLOCK):
            o = start + tl.arange(0, BLOCK)
            o_c = o % CP
            m = (o_c < C) & (o // CP < KD * KH * KW) & (i_o < COUT)
            b_w = tl.load(p_w + o_c * stride_c + (o // CP) * stride_tap, mask=m, other=0.0).to(tl.float32)
            powers = scale_for(tl.load(p_largest + o_c, mask=o_c < C, other=0).to(tl.float32, bitcast=True))
            largest = tl.maximum(largest, finite_magnitude(b_w / powers))
        scale = scale_for(tl.max(largest))
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
        b_w = tl.load(p_w + o_c * stride_c + tap * stride_tap, mask=m, other=0.0)
        b_s = b_w
        if SCALED:
            powers = scale_for(tl.load(p_largest + o_c, mask=o_c < C, other=0).to(tl.float32, bitcast=True))
            b_s = b_w.to(tl.float32) / powers * scale
        high = (not_zero(b_w, b_s) if KEEPS else b_s).to(p_out.dtype.element_ty)
        if KEEPS and PLANES == 2:
            flag_infinity(p_largest + C, b_w)
        tl.store(p_out + i_o * (PLANES * K) + o, high, mask=o < K)
        if PLANES == 2:
            tl.store(p_out + i_o * (PLANES * K) + K + o, rest_of(b_s, high).to(p_out.dtype.element_ty), mask=o < K)


@triton.jit
def phase_of(remainder, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, FRONT: tl.constexpr):
    """Of a phase along one axis: its taps, where they begin in the packed weight, and what cell 0 reads first."""
    MOST: tl.constexpr = (K + S - 1) // S
    residue = (remainder + P) % S
    taps = taps_of(residue, K, S)
    return taps, residue * MOST, (remainder + P) // S - taps + 1 + FRONT


@triton.jit
def phase_sum(
    d_high,
    d_low,
    d_w,
    p_inf,
    row,  # of the product's first cell, for the first tap along z and y
    column,
    taps_z,
    taps_y,
    slot_z,
    slot_y,
    i_x,  # the phase along x
    PITCH,
    PLANE,
    SLOTS_Y: tl.constexpr,
    KW: tl.constexpr,
    SW: tl.constexpr,
    PW: tl.constexpr,
    FW: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PLANES: tl.constexpr,
    KEEPS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    ACC: tl.constexpr,
):
    """The sums of one phase, [BM, BC]."""
    KB: tl.constexpr = C // BK
    SLOTS_X: tl.constexpr = (KW + SW - 1) // SW * SW
    taps_x, slot_x, start_x = phase_of(i_x, KW, SW, PW, FW)
    steps = taps_z * taps_y * taps_x * KB
    taps_x, taps_y = tl.maximum(taps_x, 1), tl.maximum(taps_y, 1)  # divided by, even where there are no steps
    acc = tl.zeros([BM, BC], ACC)
    for i in tl.range(0, steps, num_stages=STAGES):
        kx = i // KB % taps_x
        ky = i // KB // taps_x % taps_y
        kz = i // KB // taps_x // taps_y
        at = [row + kz * PLANE + ky * PITCH + start_x + kx, i % KB * BK]
        k = (((slot_z + kz) * SLOTS_Y + slot_y + ky) * SLOTS_X + slot_x + kx) * C + i % KB * BK
        high = d_high.load(at)  # [BM, BK]
        w_high = d_w.load([column, k])  # [BC, BK]
        if PLANES == 2:
            low = d_low.load(at)
            w_low = d_w.load([column, K + k])
            part = tl.dot(low, w_high.T)  # summed up as in convolve.py
            part = tl.dot(high, w_low.T, part)
            part = tl.dot(high, w_high.T, part)
            acc += part
        else:
            acc = tl.dot(high, w_high.T, acc, out_dtype=ACC)
    if KEEPS and PLANES == 2:  # noqa: SIM102 (decided when compiling; the other when running)
        if tl.load(p_inf) != 0:
            alone = tl.zeros([BM, BC], ACC)
            for i in tl.range(0, steps):
                kx = i // KB % taps_x
                ky = i // KB // taps_x % taps_y
                kz = i // KB // taps_x // taps_y
                k = (((slot_z + kz) * SLOTS_Y + slot_y + ky) * SLOTS_X + slot_x + kx) * C + i % KB * BK
                high = d_high.load([row + kz * PLANE + ky * PITCH + start_x + kx, i % KB * BK])
                alone = tl.dot(high, d_w.load([column, k]).T, alone, out_dtype=ACC)
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
    p_mean,  # [N, COUT, TILES·PHASES], out, where MOMENTS
    p_m2,  # the same
    p_count,  # [N, TILES·PHASES], out, where MOMENTS: a tile's outputs that are none of the padding
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    COUT,
    TILES,  # per sample and phase
    SAMPLE_ROWS,  # positions of a packed sample
    PITCH,
    PLANE,
    OD,
    OH,
    OW,
    BEFORE: tl.constexpr,
    KD: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SD: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PD: tl.constexpr,  # the convolution's padding
    PH: tl.constexpr,
    PW: tl.constexpr,
    FD: tl.constexpr,  # zeros in front of the packed axes
    FH: tl.constexpr,
    FW: tl.constexpr,
    C: tl.constexpr,  # channels of a packed position
    PLANES: tl.constexpr,
    SCALED: tl.constexpr,
    KEEPS: tl.constexpr,  # infinities come out as of PyTorch's convolution: no norm follows that hides them
    STORE: tl.constexpr,  # "no", "raw": what the convolution gives, or "done": what BEFORE makes of it
    MOMENTS: tl.constexpr,  # "no", "both", or "sums"
    LAST: tl.constexpr,
    WIDE: tl.constexpr,
    FULL: tl.constexpr,  # COUT is a multiple of BC: one mask for all channels of a position
    BLOCKS_C: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    ACC: tl.constexpr,
):
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
    # fmt: off
    acc = phase_sum(
        d_high, d_low, d_w, p_inf, row, i_b * BC, taps_z, taps_y, slot_z, slot_y, i_x, PITCH, PLANE,
        SLOTS_Y, KW, SW, PW, FW, K, C, PLANES, KEEPS, BM, BC, BK, STAGES, ACC,
    )
    # A tile's last axis is the one along which the output lies side by side: so does the compiler lay out its threads.
    if NEIGHBOURS == 2:
        next_acc = phase_sum(
            d_high, d_low, d_w, p_inf, row, i_b * BC, taps_z, taps_y, slot_z, slot_y, i_x + 1, PITCH, PLANE,
            SLOTS_Y, KW, SW, PW, FW, K, C, PLANES, KEEPS, BM, BC, BK, STAGES, ACC,
        )
        both = tl.join(acc, next_acc)  # [BM, BC, 2]
        if LAST:
            b_v = tl.reshape(tl.permute(both, (0, 2, 1)), [2 * BM, BC])
        else:
            b_v = tl.reshape(tl.permute(both, (1, 0, 2)), [BC, 2 * BM])
    else:
        b_v = acc if LAST else acc.T
    # fmt: on
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
    o_s = tl.expand_dims((z * OH + y) * OW + x, 1 - AXIS)
    S = OD * OH * OW
    base = i_n.to(tl.int64) * COUT * S
    o_v = tl.expand_dims(o_c, AXIS)
    if WIDE:
        o_s, o_v = o_s.to(tl.int64), o_v.to(tl.int64)
    o_x = o_s * COUT + o_v if LAST else o_v * S + o_s
    m_x = tl.expand_dims(m_s, 1 - AXIS)
    if not FULL:
        m_x = m_x & tl.expand_dims(m_c, AXIS)
    if STORE == "raw":
        tl.store(p_y + base + o_x, b_v.to(p_y.dtype.element_ty), mask=m_x)
    b_v = BEFORE(b_v, o_c, base, o_x, m_c, m_x, a0, a1, a2, a3, a4, a5)
    if MOMENTS != "no":
        i_part = i_tile * PHASES + i_phase
        count = tl.sum(m_s.to(ACC))
        b_sum = tl.sum(tl.where(m_x, b_v, 0.0), axis=AXIS)  # [BC]
        o_out = (i_n * COUT + o_c) * (TILES * PHASES) + i_part
        if MOMENTS == "both":
            b_mean = b_sum / tl.maximum(count, 1.0)
            b_diff = tl.where(m_x, b_v - tl.expand_dims(b_mean, AXIS), 0.0)
            tl.store(p_mean + o_out, b_mean, mask=m_c)
            tl.store(p_m2 + o_out, tl.sum(b_diff * b_diff, axis=AXIS), mask=m_c)
        else:
            tl.store(p_mean + o_out, b_sum, mask=m_c)
        if i_b == 0:
            tl.store(p_count + i_n * (TILES * PHASES) + i_part, count)
    if STORE == "done":
        tl.store(p_y + base + o_x, b_v.to(p_y.dtype.element_ty), mask=m_x)
