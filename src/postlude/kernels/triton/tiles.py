"""The tile of a program in a value in memory: its channels, its positions, and their offsets and masks.

There are three layouts:

    contiguous      [N·C, S]: a program has one row, so one channel, and its tile is [BLOCK_S]; BLOCK_C is 0
    channels-last   [N, S, C]: a tile is BLOCK_S positions of BLOCK_C channels
    short rows      [N, C, S], handled as channels-last (HAS_SHORT_ROWS): BLOCK_S covers a row, a tile is BLOCK_C rows

The start of a row or sample is a 64-bit number. Offsets from there have 32 bits unless a sample needs more
(USES_INT64).
"""

import triton
import triton.language as tl


@triton.jit
def places(o_s, o_c, C, S, IS_CONTIGUOUS: tl.constexpr, USES_INT64: tl.constexpr):
    """Offsets in a sample, [BLOCK_S, BLOCK_C]: of [C, S] where IS_CONTIGUOUS, else of [S, C]."""
    if IS_CONTIGUOUS:
        return (o_c[None, :].to(tl.int64) if USES_INT64 else o_c[None, :]) * S + o_s[:, None]
    return (o_s[:, None].to(tl.int64) if USES_INT64 else o_s[:, None]) * C + o_c[None, :]


@triton.jit
def own_channels(C, S, CHUNKS, BLOCK_C: tl.constexpr):
    """A program's chunk, its row of [N·C] or its sample, its channels with their mask, and the base of its offsets."""
    i_chunk = tl.program_id(0) % CHUNKS
    i_row = tl.program_id(0) // CHUNKS
    if BLOCK_C == 0:
        base = i_row.to(tl.int64) * S
        o_c = i_row % C
        m_c = True
    else:
        base = i_row.to(tl.int64) * S * C
        o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
        m_c = o_c < C
    return i_chunk, i_row, o_c, m_c, base


@triton.jit
def own_rows(i_row, o_c, C, BLOCK_C: tl.constexpr):
    """The rows in [N·C] of a program's channels."""
    return i_row if BLOCK_C == 0 else i_row * C + o_c


@triton.jit
def own_sample(i_row, C, BLOCK_C: tl.constexpr):
    return i_row // C if BLOCK_C == 0 else i_row


@triton.jit
def has_first(o_c, BLOCK_C: tl.constexpr):
    """Whether a program has its sample's first channel. That program stores what exists once per sample."""
    return o_c == 0 if BLOCK_C == 0 else tl.program_id(1) == 0


@triton.jit
def own_tile(
    start, o_c, m_c, C, S,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, IS_CONTIGUOUS: tl.constexpr, USES_INT64: tl.constexpr,
):  # fmt: skip
    """Offsets and mask of the tile whose positions begin at `start`: [BLOCK_S], or [BLOCK_S, BLOCK_C]."""
    o_s = start + tl.arange(0, BLOCK_S)
    if BLOCK_C == 0:
        o_x = o_s
        m_x = o_s < S
    else:
        o_x = places(o_s, o_c, C, S, IS_CONTIGUOUS, USES_INT64)  # [BLOCK_S, BLOCK_C]
        m_x = (o_s < S)[:, None] & m_c[None, :]
    return o_x, m_x


@triton.jit
def beside(x, BLOCK_C: tl.constexpr):
    """A number per channel, in the shape that broadcasts over a tile: one number, or [1, BLOCK_C]."""
    return x if BLOCK_C == 0 else x[None, :]


@triton.jit
def of_groups(p_first, p_second, o_g, m_g, HAS_NORM: tl.constexpr, ACC: tl.constexpr):
    """Two numbers of each group, such as its mean and rstd; without a norm, two zeros that are not used."""
    first = tl.zeros([], ACC)
    second = first
    if HAS_NORM:
        first = tl.load(p_first + o_g, mask=m_g, other=0.0)
        second = tl.load(p_second + o_g, mask=m_g, other=0.0)
    return first, second


@triton.jit
def store_full(p_full0, p_full1, o, blocks, mask, START: tl.constexpr, NUM_FULL: tl.constexpr):
    """Stores NUM_FULL blocks from START on, each in its own tensor."""
    if NUM_FULL > 0:
        tl.store(p_full0 + o, blocks[START].to(p_full0.dtype.element_ty), mask=mask)
    if NUM_FULL > 1:
        tl.store(p_full1 + o, blocks[START + 1].to(p_full1.dtype.element_ty), mask=mask)
