"""The passes of a chain's backward: sums that the norm's gradient needs, their combination, and all gradients.

Names are as in normalize.py; p_g is the gradient of the chain's last value; reverse.py builds SUMS_FN and GRADIENT_FN.
Sums are kept per chunk and added in a fixed order in float64, because partial sums of opposite signs may be far larger
than their total.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.planes import finite_magnitude, flag_infinity
from postlude.kernels.triton.tiles import beside, of_groups, own_channels, own_rows, own_tile, store_full


@triton.jit
def added(totals, blocks, mask, NUM_SUMS: tl.constexpr):
    sums = ()
    for i in tl.static_range(NUM_SUMS):
        sums += (totals[i] + tl.where(mask, blocks[i], 0.0),)  # lanes past the end may hold NaN
    return sums


@triton.jit
def sums_kernel(
    p_x, p_g,  # [N, C, S] in the value's layout
    p_mean, p_rstd,  # [N·G]
    p_sums,  # [NUM_SUMS, N, C, CHUNKS], out
    a0, a1, a2, a3, a4, a5,
    C, S, CHUNKS,
    TILES_PER_PROGRAM,  # of a chunk
    C_PER_GROUP,
    SUM_STRIDE,  # from one of the sums to the next: N·C·CHUNKS
    SUMS_FN: tl.constexpr, NUM_SUMS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_SHORT_ROWS: tl.constexpr, ALIGN: tl.constexpr,  # as in normalize.py
    USES_INT64: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    S = S // ALIGN * ALIGN  # same value; shows the compiler that ALIGN divides it, also in masks
    i_chunk, i_row, o_c, m_c, base = own_channels(C, S, CHUNKS, BLOCK_C)
    o_row = own_rows(i_row, o_c, C, BLOCK_C)
    mean, rstd = of_groups(p_mean, p_rstd, o_row // C_PER_GROUP, m_c, True, ACC)
    totals = (tl.zeros([BLOCK_S] if BLOCK_C == 0 else [BLOCK_S, BLOCK_C], ACC),) * NUM_SUMS
    for i_tile in range(TILES_PER_PROGRAM):
        o_x, m_x = own_tile(
            (i_chunk * TILES_PER_PROGRAM + i_tile) * BLOCK_S, o_c, m_c, C, S,
            BLOCK_S, BLOCK_C, HAS_SHORT_ROWS, USES_INT64,
        )  # fmt: skip
        b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
        b_g = tl.load(p_g + base + o_x, mask=m_x, other=0.0).to(ACC)
        blocks = SUMS_FN(
            b_x, b_g, mean, rstd, beside(o_c, BLOCK_C), base, o_x, beside(m_c, BLOCK_C), m_x, a0, a1, a2, a3, a4, a5
        )
        totals = added(totals, blocks, m_x, NUM_SUMS)
    for i in tl.static_range(NUM_SUMS):
        tl.store(p_sums + i * SUM_STRIDE + o_row * CHUNKS + i_chunk, tl.sum(totals[i], axis=0), mask=m_c)


@triton.jit
def combine_sums_kernel(
    p_sums,  # [2 or more, N·G, C_PER_GROUP, CHUNKS]: sums of dn, and of dn · x̂
    p_gamma,  # [C], not read without HAS_GAMMA
    p_a,  # [N·G], out: the mean of γ · dn over a group
    p_b,  # [N·G], out: the mean of γ · dn · x̂
    GROUPS, C_PER_GROUP, S, CHUNKS,
    SUM_STRIDE,  # N·C·CHUNKS
    HAS_GAMMA: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    i_group = tl.program_id(0)
    base = i_group.to(tl.int64) * C_PER_GROUP * CHUNKS
    first = i_group % GROUPS * C_PER_GROUP  # the group's first channel
    a = tl.zeros([BLOCK_PARTS], tl.float64)
    b = tl.zeros([BLOCK_PARTS], tl.float64)
    for start in range(0, C_PER_GROUP * CHUNKS, BLOCK_PARTS):
        o = start + tl.arange(0, BLOCK_PARTS)
        m = o < C_PER_GROUP * CHUNKS
        b_a = tl.load(p_sums + base + o, mask=m, other=0.0).to(tl.float64)  # [BLOCK_PARTS]
        b_b = tl.load(p_sums + SUM_STRIDE + base + o, mask=m, other=0.0).to(tl.float64)
        if HAS_GAMMA:
            b_gamma = tl.load(p_gamma + first + o // CHUNKS, mask=m, other=0.0).to(tl.float64)
            b_a *= b_gamma
            b_b *= b_gamma
        a += b_a
        b += b_b
    count = tl.cast(C_PER_GROUP, tl.float64) * S
    tl.store(p_a + i_group, (tl.sum(a) / count).to(p_a.dtype.element_ty))
    tl.store(p_b + i_group, (tl.sum(b) / count).to(p_b.dtype.element_ty))


@triton.jit
def add_channels_kernel(
    p_first,  # [NUM_FIRST, N, C, CHUNKS_FIRST]
    p_second,  # [NUM_SECOND, N, C, CHUNKS_SECOND]
    p_out,  # [NUM_FIRST + NUM_SECOND, C], out
    N, C, CHUNKS_FIRST, CHUNKS_SECOND, NUM_FIRST,
    BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    i_out = tl.program_id(0)
    i_c = tl.program_id(1)
    chunks = CHUNKS_FIRST
    p = p_first + i_out.to(tl.int64) * N * C * CHUNKS_FIRST
    if i_out >= NUM_FIRST:
        chunks = CHUNKS_SECOND
        p = p_second + (i_out - NUM_FIRST).to(tl.int64) * N * C * CHUNKS_SECOND
    total = tl.zeros([BLOCK_PARTS], tl.float64)
    for start in range(0, N * chunks, BLOCK_PARTS):
        o = start + tl.arange(0, BLOCK_PARTS)
        o_x = (o // chunks * C + i_c) * chunks + o % chunks
        total += tl.load(p + o_x, mask=o < N * chunks, other=0.0).to(tl.float64)
    tl.store(p_out + i_out * C + i_c, tl.sum(total).to(p_out.dtype.element_ty))


@triton.jit
def gradient_kernel(
    p_x, p_g,  # [N, C, S] in the value's layout
    p_mean, p_rstd, p_a, p_b,  # [N·G]
    p_dx,  # as p_x, out
    p_sums,  # [NUM_SUMS, N, C, CHUNKS], out
    p_full0,  # as p_x, out where NUM_FULL
    p_full1,  # as p_x, out where NUM_FULL is 2
    p_largest,  # [C], the largest magnitudes in p_dx, as in pack.py; where HAS_LARGEST
    a0, a1, a2, a3, a4, a5,
    C, S, CHUNKS, C_PER_GROUP, SUM_STRIDE,
    GRADIENT_FN: tl.constexpr, HAS_NORM: tl.constexpr,
    NUM_SUMS: tl.constexpr,  # blocks after the first that are summed
    NUM_FULL: tl.constexpr,  # blocks after those that are stored
    HAS_LARGEST: tl.constexpr,  # also find each channel's largest magnitude
    FLAGS_INF: tl.constexpr,  # and write a 1 after them if there is an infinity
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, HAS_SHORT_ROWS: tl.constexpr, ALIGN: tl.constexpr,
    USES_INT64: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    S = S // ALIGN * ALIGN  # same value; shows the compiler that ALIGN divides it, also in masks
    i_chunk, i_row, o_c, m_c, base = own_channels(C, S, CHUNKS, BLOCK_C)
    o_x, m_x = own_tile(i_chunk * BLOCK_S, o_c, m_c, C, S, BLOCK_S, BLOCK_C, HAS_SHORT_ROWS, USES_INT64)
    b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
    b_g = tl.load(p_g + base + o_x, mask=m_x, other=0.0).to(ACC)
    o_g = own_rows(i_row, o_c, C, BLOCK_C) // C_PER_GROUP
    mean, rstd = of_groups(p_mean, p_rstd, o_g, m_c, HAS_NORM, ACC)
    a, b = of_groups(p_a, p_b, o_g, m_c, HAS_NORM, ACC)
    blocks = GRADIENT_FN(
        b_x, b_g, mean, rstd, a, b, beside(o_c, BLOCK_C), base, o_x, beside(m_c, BLOCK_C), m_x, a0, a1, a2, a3, a4, a5
    )
    tl.store(p_dx + base + o_x, blocks[0].to(p_dx.dtype.element_ty), mask=m_x)
    if HAS_LARGEST:
        b_dx = tl.where(m_x, blocks[0], 0.0)
        b_largest = tl.max(finite_magnitude(b_dx), axis=0)
        tl.atomic_max(p_largest + o_c, b_largest.to(tl.int32, bitcast=True), mask=m_c, sem="relaxed")
        if FLAGS_INF:
            flag_infinity(p_largest + C, b_dx)
    o_out = own_rows(i_row, o_c, C, BLOCK_C) * CHUNKS + i_chunk
    for i in tl.static_range(NUM_SUMS):
        total = tl.sum(tl.where(m_x, blocks[1 + i], 0.0), axis=0)
        tl.store(p_sums + i * SUM_STRIDE + o_out, total, mask=m_c)
    store_full(p_full0, p_full1, base + o_x, blocks, m_x, 1 + NUM_SUMS, NUM_FULL)
