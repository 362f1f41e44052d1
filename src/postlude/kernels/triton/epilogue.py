"""The epilogue of a GEMM kernel: what happens to a tile of the accumulator before the kernel ends.

STORE says what is stored: "no", "raw" (the product itself) or "done" (after STEPS_FN). MOMENTS says what is kept of the
values after STEPS_FN, per channel and tile: "no", "sums", or "both" (mean and M2, the sum of squared deviations).
"""

import triton
import triton.language as tl

from postlude.kernels.triton.pointwise import quotient


@triton.jit
def epilogue(
    b_v,  # the tile: [positions, BLOCK_C], or [BLOCK_C, positions] where POSITION_AXIS is 1
    o_c, m_c, o_s, m_s,  # channels [BLOCK_C] and positions in the output, each with its mask
    i_n, i_b, i_chunk,  # the sample, the block of channels, and the tile's number among CHUNKS of a sample
    p_y, p_mean, p_m2, p_count, a0, a1, a2, a3, a4, a5,
    C_OUT, S, CHUNKS,
    STEPS_FN: tl.constexpr, STORE: tl.constexpr, MOMENTS: tl.constexpr,
    IS_CHANNELS_LAST: tl.constexpr, USES_INT64: tl.constexpr, IS_EVEN_C: tl.constexpr,
    POSITION_AXIS: tl.constexpr,  # which axis of the tile has the positions
    ACC: tl.constexpr,
):  # fmt: skip
    base = i_n.to(tl.int64) * C_OUT * S
    o_v = o_s
    o_k = o_c
    if USES_INT64:
        o_v, o_k = o_s.to(tl.int64), o_c.to(tl.int64)
    o_x = (
        tl.expand_dims(o_k, POSITION_AXIS) * (1 if IS_CHANNELS_LAST else S)
        + tl.expand_dims(o_v, 1 - POSITION_AXIS) * (C_OUT if IS_CHANNELS_LAST else 1)
    )  # fmt: skip
    m_x = tl.expand_dims(m_s, 1 - POSITION_AXIS)
    if not IS_EVEN_C:
        m_x = m_x & tl.expand_dims(m_c, POSITION_AXIS)
    if STORE == "raw":
        tl.store(p_y + base + o_x, b_v.to(p_y.dtype.element_ty), mask=m_x)
    b_v = STEPS_FN(b_v, o_c, base, o_x, m_c, m_x, a0, a1, a2, a3, a4, a5)
    if MOMENTS != "no":
        count = tl.sum(m_s.to(ACC))
        b_sum = tl.sum(tl.where(m_x, b_v, 0.0), axis=POSITION_AXIS)  # [BLOCK_C]
        o_out = (i_n * C_OUT + o_c) * CHUNKS + i_chunk
        if MOMENTS == "both":
            b_mean = quotient(b_sum, tl.maximum(count, 1.0))
            b_diff = tl.where(m_x, b_v - tl.expand_dims(b_mean, POSITION_AXIS), 0.0)
            tl.store(p_mean + o_out, b_mean, mask=m_c)
            tl.store(p_m2 + o_out, tl.sum(b_diff * b_diff, axis=POSITION_AXIS), mask=m_c)
        else:
            tl.store(p_mean + o_out, b_sum, mask=m_c)
        if i_b == 0:
            tl.store(p_count + i_n * CHUNKS + i_chunk, count)
    if STORE == "done":  # after the moments: the store has another layout, and both at once would spill registers
        tl.store(p_y + base + o_x, b_v.to(p_y.dtype.element_ty), mask=m_x)
