"""Passes by rows: a tile holds whole rows, so norms, softmax and reductions over a row need only one pass over a value.

layer_norm's row is the elements of its last axes. After a linear layer a row is a sample's features, or one group of
them (HAS_GROUPS).

Names are as in normalize.py. A contiguous value is seen as rows of L elements, ROWS_PER_CHANNEL of them for each sample
and channel; a tile has BLOCK_ROWS rows. Where a row is a whole sample (IS_WHOLE_SAMPLE), it holds its channels one
after the other.

Reductions give one number per row, as a block [BLOCK_ROWS, 1].
"""

import triton
import triton.language as tl

from postlude.kernels.triton.channels import row_largest, row_logsumexp
from postlude.kernels.triton.pointwise import exp, quotient
from postlude.kernels.triton.tiles import store_full


@triton.jit
def row_mean(x, m_x, L):
    return quotient(tl.sum(tl.where(m_x, x, 0.0), axis=1), tl.cast(L, x.dtype))[:, None]  # [BLOCK_ROWS, 1]


@triton.jit
def row_statistics(x, m_x, L, eps):
    mean = row_mean(x, m_x, L)
    centred = x - mean
    return mean, 1.0 / tl.sqrt(row_mean(centred * centred, m_x, L) + eps)


@triton.jit
def row_sum(x, m_x):
    return tl.sum(tl.where(m_x, x, 0.0), axis=1)[:, None]  # [BLOCK_ROWS, 1]


@triton.jit
def row_max(x, m_x):
    return row_largest(tl.where(m_x, x, float("-inf")))[:, None]


@triton.jit
def row_min(x, m_x):
    return -row_largest(tl.where(m_x, -x, float("-inf")))[:, None]


@triton.jit
def row_log_sum_exp(x, m_x):
    return row_logsumexp(tl.where(m_x, x, float("-inf")))[:, None]


@triton.jit
def row_softmax(x, m_x):
    """Softmax of each row. A row with +∞, or with nothing but −∞, becomes NaN, as in PyTorch."""
    largest = tl.max(tl.where(m_x, x, float("-inf")), axis=1)[:, None]
    powers = tl.where(m_x, exp(x - largest), 0.0)
    return powers * quotient(1.0, tl.sum(powers, axis=1))[:, None]


@triton.jit
def row_log_softmax(x, m_x):
    """The same rows are NaN."""
    x = x - tl.max(tl.where(m_x, x, float("-inf")), axis=1)[:, None]
    return x - tl.log(tl.sum(tl.where(m_x, exp(x), 0.0), axis=1))[:, None]


@triton.jit
def row_normalize(x, m_x, eps):
    """x / max(‖x‖, eps) of each row; a length that is NaN stays."""
    x = tl.where(m_x, x, 0.0)
    length = tl.sqrt(tl.sum(x * x, axis=1))[:, None]
    return x / tl.where(length < eps, eps, length)


@triton.jit
def rows_kernel(
    p_x,  # [ROWS, L]
    p_y,  # [ROWS, L], out; may be p_x. [ROWS] where IS_REDUCED
    a0, a1, a2, a3, a4, a5,
    C,
    ROWS_PER_CHANNEL,  # per sample
    L, ROWS,
    ROW_STEPS_FN: tl.constexpr,  # all steps, as one composed function (see steps.py)
    IS_WHOLE_SAMPLE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides L: Triton itself checks only for 16
    HAS_GROUPS: tl.constexpr,  # a sample is C // L rows, each with L of its channels
    IS_REDUCED: tl.constexpr,  # the steps leave one number per row
    HAS_ONE_CHANNEL: tl.constexpr,  # a tile's rows are all of one channel
    IS_EVEN_ROWS: tl.constexpr,  # every tile is full: L is BLOCK_L, and BLOCK_ROWS divides ROWS
    ACC: tl.constexpr,
):  # fmt: skip
    L = L // ALIGN * ALIGN  # same value; shows the compiler that ALIGN divides it, also in masks
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    o_r = tl.arange(0, BLOCK_ROWS)
    o_l = tl.arange(0, BLOCK_L)[None, :]
    o_x = o_r[:, None] * L + o_l  # [BLOCK_ROWS, BLOCK_L]
    m_x = tl.full([BLOCK_ROWS, BLOCK_L], True, tl.int1) if IS_EVEN_ROWS else (first + o_r < ROWS)[:, None] & (o_l < L)
    if IS_WHOLE_SAMPLE:
        o_c = o_l // (L // C)
    elif HAS_GROUPS:
        o_c = ((first + o_r) % (C // L) * L)[:, None].to(tl.int32) + o_l
    elif HAS_ONE_CHANNEL:
        o_c = tl.program_id(0) // (ROWS_PER_CHANNEL // BLOCK_ROWS) % C
    else:
        o_c = ((first + o_r) // ROWS_PER_CHANNEL % C)[:, None]  # costs 64-bit divisions, hence the case above
    b_x = tl.load(p_x + first * L + o_x, mask=m_x, other=0.0).to(ACC)
    b_y = ROW_STEPS_FN(b_x, o_l, L, o_c, first * L, o_x, o_c < C, m_x, a0, a1, a2, a3, a4, a5)
    if IS_REDUCED:
        m_r = (first + o_r < ROWS)[:, None]
        tl.store(p_y + first + o_r[:, None], b_y.to(p_y.dtype.element_ty), mask=m_r)
    else:
        tl.store(p_y + first * L + o_x, b_y.to(p_y.dtype.element_ty), mask=m_x)


@triton.jit
def with_sums(totals, blocks, m_x, START: tl.constexpr, NUM_SUMS: tl.constexpr, IS_OVER_ROWS: tl.constexpr):
    """`totals` plus the sums of NUM_SUMS blocks from START on: over the rows, or over the whole tile."""
    sums = ()
    for i in tl.static_range(NUM_SUMS):
        block = tl.where(m_x, blocks[START + i], 0.0)  # lanes past the end may hold NaN
        if IS_OVER_ROWS:
            sums += (totals[i] + tl.sum(block, axis=0),)
        else:
            sums += (totals[i] + tl.sum(block),)
    return sums


@triton.jit
def rows_gradient_kernel(
    p_x, p_g,  # [N·C, ROWS_PER_CHANNEL, L], or [N, GROUPS, L] where HAS_GROUPS; p_g is [N] where IS_REDUCED
    p_dx,  # as p_x, out
    p_sums,  # [NUM_SUMS, N·C, CHUNKS], out
    p_columns,  # [NUM_COLUMN_SUMS, N·C·CHUNKS, L], or [NUM_COLUMN_SUMS, CHUNKS, GROUPS, L] where HAS_GROUPS, out
    p_full0,  # as p_x, out where NUM_FULL
    p_full1,  # as p_x, out where NUM_FULL is 2
    a0, a1, a2, a3, a4, a5,
    C,
    ROWS_PER_CHANNEL,  # N where HAS_GROUPS
    L, CHUNKS,
    TILES_PER_PROGRAM,  # of a chunk
    SUM_STRIDE,  # from one of the sums to the next: N·C·CHUNKS
    ROW_GRADIENT_FN: tl.constexpr,  # see reverse.py
    NUM_SUMS: tl.constexpr,  # blocks after the first that are summed
    NUM_FULL: tl.constexpr,  # blocks after those that are stored
    NUM_COLUMN_SUMS: tl.constexpr,  # the blocks after those are summed over rows
    HAS_GROUPS: tl.constexpr,  # a sample is C // L rows, each with L of its channels; a program has one such row of
    # several samples
    IS_REDUCED: tl.constexpr,  # the steps left one number per row
    BLOCK_ROWS: tl.constexpr, BLOCK_L: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    L = L // ALIGN * ALIGN
    o_l = tl.arange(0, BLOCK_L)[None, :]
    if HAS_GROUPS:
        i_chunk = tl.program_id(0) // (C // L)
        first = tl.program_id(0) % (C // L) * L
        o_c = first + o_l
        pitch = C
    else:
        i_chunk = tl.program_id(0) % CHUNKS
        i_row = tl.program_id(0) // CHUNKS
        first = i_row.to(tl.int64) * ROWS_PER_CHANNEL * L
        o_c = i_row % C
        pitch = L
    totals = (tl.zeros([], ACC),) * NUM_SUMS
    columns = (tl.zeros([BLOCK_L], ACC),) * NUM_COLUMN_SUMS
    for i_tile in range(TILES_PER_PROGRAM):
        start = (i_chunk * TILES_PER_PROGRAM + i_tile) * BLOCK_ROWS
        base = first + start.to(tl.int64) * pitch
        o_r = tl.arange(0, BLOCK_ROWS)
        o_x = o_r[:, None] * pitch + o_l  # [BLOCK_ROWS, BLOCK_L]
        m_r = (start + o_r < ROWS_PER_CHANNEL)[:, None]
        m_x = m_r & (o_l < L)
        b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
        if IS_REDUCED:
            b_g = tl.load(p_g + start + o_r[:, None], mask=m_r, other=0.0).to(ACC)  # [BLOCK_ROWS, 1]
        else:
            b_g = tl.load(p_g + base + o_x, mask=m_x, other=0.0).to(ACC)
        blocks = ROW_GRADIENT_FN(b_x, b_g, o_l, L, o_c, base, o_x, o_c < C, m_x, a0, a1, a2, a3, a4, a5)
        tl.store(p_dx + base + o_x, blocks[0].to(p_dx.dtype.element_ty), mask=m_x)
        totals = with_sums(totals, blocks, m_x, 1, NUM_SUMS, False)
        columns = with_sums(columns, blocks, m_x, 1 + NUM_SUMS + NUM_FULL, NUM_COLUMN_SUMS, True)
        store_full(p_full0, p_full1, base + o_x, blocks, m_x, 1 + NUM_SUMS, NUM_FULL)
    for i in tl.static_range(NUM_SUMS):
        tl.store(p_sums + i * SUM_STRIDE + tl.program_id(0), totals[i])
    o_column = tl.arange(0, BLOCK_L)
    for i in tl.static_range(NUM_COLUMN_SUMS):
        place = (i * SUM_STRIDE + tl.program_id(0)).to(tl.int64) * L
        tl.store(p_columns + place + o_column, columns[i], mask=o_column < L)
