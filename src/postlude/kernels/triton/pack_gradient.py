"""All gradients of a chain's steps, with the gradient at the convolution's result written packed.

The same as gradient.py's last kernel, by rows of a packed volume (see pack.py). Only the GEMMs of the convolution's
gradients read this gradient, so it is never stored in its own layout.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.pack import packed_row, store_border
from postlude.kernels.triton.tiles import of_groups, store_full


@triton.jit
def packed_gradient_kernel(
    p_x, p_g,  # [N, C, D, H, W], or [N, D, H, W, C] where IS_CHANNELS_LAST
    p_mean, p_rstd, p_a, p_b,  # [N·G]
    p_packed,  # [PACKED_ROWS, ROW_PITCH, C_PACKED], out
    p_sums,  # [NUM_SUMS, N, C, CHUNKS], out
    p_full0,  # as p_x, out where NUM_FULL
    p_full1,  # as p_x, out where NUM_FULL is 2
    a0, a1, a2, a3, a4, a5,
    N, C, D, H, W,
    PD, PH, PW,  # padding in front of each axis
    ROW_PITCH,  # positions of a packed row: PW + W
    SLICE_ROWS, SAMPLE_ROWS,  # rows of a packed slice and of a packed sample, padding included
    CHUNKS,  # D·H times the blocks of a row
    C_PER_GROUP,
    GRADIENT_FN: tl.constexpr, HAS_NORM: tl.constexpr,
    NUM_SUMS: tl.constexpr,  # blocks after the first that are summed
    NUM_FULL: tl.constexpr,  # blocks after those that are stored
    C_PACKED: tl.constexpr,  # channels of a position, padded
    IS_CHANNELS_LAST: tl.constexpr,
    BLOCK_W: tl.constexpr,  # positions of a row
    BLOCK_C: tl.constexpr,
    BLOCK_PAD: tl.constexpr,  # a power of two, at least PW
    USES_INT64: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides W: Triton itself checks only for 16
    ACC: tl.constexpr,
):  # fmt: skip
    W = W // ALIGN * ALIGN  # same value; shows the compiler that ALIGN divides it, also in masks
    i_row = tl.program_id(0)
    i_n, z, y, is_row = packed_row(i_row, N, D, H, PD, PH, SLICE_ROWS, SAMPLE_ROWS)
    o_w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    o_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_w = (o_w < W) & is_row
    m_c = (o_c < C) & is_row
    base = i_n.to(tl.int64) * C * D * H * W
    row = (z * H + y) * W
    i_c = o_c[None, :] if IS_CHANNELS_LAST else o_c[:, None]
    m_i = m_c[None, :] if IS_CHANNELS_LAST else m_c[:, None]
    o_s = (row + o_w)[:, None] if IS_CHANNELS_LAST else (row + o_w)[None, :]
    m_x = m_i & (m_w[:, None] if IS_CHANNELS_LAST else m_w[None, :])
    if IS_CHANNELS_LAST:
        o_x = (o_s.to(tl.int64) if USES_INT64 else o_s) * C + i_c  # [BLOCK_W, BLOCK_C]
    else:
        o_x = (i_c.to(tl.int64) if USES_INT64 else i_c) * (D * H * W) + o_s  # [BLOCK_C, BLOCK_W]
    b_x = tl.load(p_x + base + o_x, mask=m_x, other=0.0).to(ACC)
    b_g = tl.load(p_g + base + o_x, mask=m_x, other=0.0).to(ACC)
    mean, rstd = of_groups(p_mean, p_rstd, (i_n * C + i_c) // C_PER_GROUP, m_i, HAS_NORM, ACC)
    a, b = of_groups(p_a, p_b, (i_n * C + i_c) // C_PER_GROUP, m_i, HAS_NORM, ACC)
    blocks = GRADIENT_FN(b_x, b_g, mean, rstd, a, b, i_c, base, o_x, m_i, m_x, a0, a1, a2, a3, a4, a5)
    b_dx = tl.where(m_x, blocks[0], 0.0).to(p_packed.dtype.element_ty)
    if not IS_CHANNELS_LAST:
        b_dx = tl.trans(b_dx)
    out = i_row.to(tl.int64) * ROW_PITCH * C_PACKED
    o_out = (PW + o_w)[:, None] * C_PACKED + o_c[None, :]
    m_out = (o_w < W)[:, None] & (o_c < C_PACKED)[None, :]
    tl.store(p_packed + out + o_out, b_dx, mask=m_out)
    store_border(p_packed, p_packed, out, o_c, PW, C_PACKED, 1, BLOCK_PAD, BLOCK_C)
    o_sum = (i_n * C + o_c) * CHUNKS + (z * H + y) * tl.num_programs(1) + tl.program_id(1)
    for i in tl.static_range(NUM_SUMS):
        total = tl.sum(tl.where(m_x, blocks[1 + i], 0.0), axis=0 if IS_CHANNELS_LAST else 1)  # [BLOCK_C]
        tl.store(p_sums + o_sum, total, mask=m_c)
        p_sums += N * C * CHUNKS
    store_full(p_full0, p_full1, base + o_x, blocks, m_x, 1 + NUM_SUMS, NUM_FULL)
