"""A linear layer as one GEMM, y = x · Wᵀ, with an epilogue for what follows it.

Rows of x and of the weight are split into half-precision planes (see planes.py), each row scaled by its own power of
two. `pack_rows_kernel` does this before the GEMM. For the weight the GEMM can do it instead (IS_WEIGHT_CUT): each step
then scales its block of the weight anew, which saves a pass over the weight and pays where x has few rows. The weight
is the left operand, because the left operand may be in registers and what is split there need not go back to shared
memory.

In the epilogue samples take the place of positions, and output features that of channels.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.epilogue import epilogue
from postlude.kernels.triton.planes import finite_magnitude, high_plane, multiply, scale_for, store_planes


@triton.jit
def unscale_of(scale):
    """1 / scale, for a power of two from `scale_for`."""
    return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def pack_rows_kernel(
    p_x,  # [ROWS, K]
    p_high,  # [ROWS, C_PACKED], out
    p_low,  # [ROWS, C_PACKED], out; where PLANES is 2
    p_unscale,  # [ROWS], out; where IS_SCALED
    K, C_PACKED,
    PLANES: tl.constexpr, IS_SCALED: tl.constexpr, KEEPS_INF: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    p_x += i_row.to(tl.int64) * K
    base = i_row.to(tl.int64) * C_PACKED
    scale = 1.0
    if IS_SCALED:
        b_largest = tl.zeros([BLOCK_K], tl.float32)
        for start in range(0, K, BLOCK_K):
            o_k = start + tl.arange(0, BLOCK_K)
            b_largest = tl.maximum(b_largest, finite_magnitude(tl.load(p_x + o_k, mask=o_k < K, other=0.0)))
        scale = scale_for(tl.max(b_largest, axis=0))
        tl.store(p_unscale + i_row, unscale_of(scale))
    for start in range(0, C_PACKED, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        b_x = tl.load(p_x + o_k, mask=o_k < K, other=0.0)  # in cache since the first loop
        b_scaled = b_x * scale if IS_SCALED else b_x
        b_high = high_plane(b_x, b_scaled, KEEPS_INF, p_high.dtype.element_ty)
        store_planes(p_high, p_low, base + o_k, b_high, b_scaled, o_k < C_PACKED, PLANES, False)


@triton.jit
def pack_columns_kernel(
    p_x,  # [K, ROWS]
    p_high,  # [ROWS, C_PACKED], out
    p_low,  # [ROWS, C_PACKED], out; where PLANES is 2
    p_unscale,  # [ROWS], out; where IS_SCALED
    ROWS, K, C_PACKED,
    PLANES: tl.constexpr, IS_SCALED: tl.constexpr, KEEPS_INF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `pack_rows_kernel`, of a matrix that lies transposed."""
    o_r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m_r = o_r < ROWS
    scale = tl.full([BLOCK_ROWS], 1.0, tl.float32)
    if IS_SCALED:
        b_largest = tl.zeros([BLOCK_K, BLOCK_ROWS], tl.float32)
        for start in range(0, K, BLOCK_K):
            o_k = start + tl.arange(0, BLOCK_K)
            o_x = o_k.to(tl.int64)[:, None] * ROWS + o_r[None, :]
            b_x = tl.load(p_x + o_x, mask=(o_k < K)[:, None] & m_r[None, :], other=0.0)
            b_largest = tl.maximum(b_largest, finite_magnitude(b_x))
        scale = scale_for(tl.max(b_largest, axis=0))
        tl.store(p_unscale + o_r, unscale_of(scale), mask=m_r)
    for start in range(0, C_PACKED, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        o_x = o_k.to(tl.int64)[:, None] * ROWS + o_r[None, :]
        b_x = tl.load(p_x + o_x, mask=(o_k < K)[:, None] & m_r[None, :], other=0.0)  # [BLOCK_K, BLOCK_ROWS]
        b_scaled = b_x * scale[None, :] if IS_SCALED else b_x
        b_high = high_plane(b_x, b_scaled, KEEPS_INF, p_high.dtype.element_ty)
        o_out = o_r.to(tl.int64)[:, None] * C_PACKED + o_k[None, :]
        store_planes(p_high, p_low, o_out, b_high, b_scaled, m_r[:, None] & (o_k < C_PACKED)[None, :], PLANES, True)


@triton.jit
def cut(b_w):
    """Both planes of an fp32 block [BLOCK_C, BLOCK_K], and the inverse scale of each of its rows.

    A row with an infinity or NaN gives no finite result here, and `cut_high` then computes the right one. To handle it
    here would cost each element about twelve instructions more than the eight or so that it needs.
    """
    scale = scale_for(tl.max(tl.abs(b_w), axis=1))
    b_scaled = b_w * scale[:, None]
    b_high = b_scaled.to(tl.float16)
    return b_high, (b_scaled - b_high.to(tl.float32)).to(tl.float16), unscale_of(scale)


@triton.jit
def cut_high(b_w):
    """The high plane, in which infinities stay infinite and no nonzero number becomes zero."""
    b_scaled = b_w * scale_for(tl.max(finite_magnitude(b_w), axis=1))[:, None]
    return high_plane(b_w, b_scaled, True, tl.float16)


@triton.jit
def weight_block(d_w, c0, k0, IS_WEIGHT_TURNED: tl.constexpr):
    """The block [BLOCK_C, BLOCK_K] of the weight."""
    return d_w.load([k0, c0]).T if IS_WEIGHT_TURNED else d_w.load([c0, k0])


@triton.jit
def linear_kernel(
    d_x,  # descriptor [S, C_PACKED] of the high plane of the input
    d_x_low,  # its low plane, where PLANES is 2
    d_w,  # descriptor of the weight: its high plane [C_OUT, C_PACKED], or where IS_WEIGHT_CUT in fp32 [C_OUT, K], or
    # [K, C_OUT] where IS_WEIGHT_TURNED
    d_w_low,  # the low plane of a packed weight
    p_x_unscale,  # [S] where IS_SCALED
    p_w_unscale,  # [C_OUT], of a packed weight
    p_y,  # [S, C_OUT], out; where STORE
    p_mean, p_m2,  # [C_OUT, TILES], out, where MOMENTS
    p_count,  # [TILES], out, where MOMENTS
    a0, a1, a2, a3, a4, a5,
    C_OUT, S, K,
    TILES,  # along the samples
    STEPS_FN: tl.constexpr, PLANES: tl.constexpr, IS_SCALED: tl.constexpr, KEEPS_INF: tl.constexpr,
    IS_WEIGHT_CUT: tl.constexpr, IS_WEIGHT_TURNED: tl.constexpr, STORE: tl.constexpr, MOMENTS: tl.constexpr,
    IS_CHANNELS_LAST: tl.constexpr, USES_INT64: tl.constexpr, IS_EVEN_C: tl.constexpr, BLOCKS_C: tl.constexpr,
    BLOCKS_TOGETHER: tl.constexpr,  # tiles along the features in one group, with all tiles along the samples
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Grouped order of tiles: programs that run at the same time share operands in L2.
    together = BLOCKS_TOGETHER * TILES
    i_first = tl.program_id(0) // together * BLOCKS_TOGETHER
    size = tl.minimum(BLOCKS_C - i_first, BLOCKS_TOGETHER)
    i_b = i_first + tl.program_id(0) % together % size
    i_tile = tl.program_id(0) % together // size
    i_n = tl.program_id(0) // (TILES * BLOCKS_C)  # 0: all rows are of one sample
    row0 = i_tile * BLOCK_M
    c0 = i_b * BLOCK_C
    acc = tl.zeros([BLOCK_C, BLOCK_M], ACC)
    for i in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        high = d_x.load([row0, i * BLOCK_K])  # [BLOCK_M, BLOCK_K]
        low = d_x_low.load([row0, i * BLOCK_K]) if PLANES == 2 else high
        w = weight_block(d_w, c0, i * BLOCK_K, IS_WEIGHT_TURNED)
        if IS_WEIGHT_CUT:
            w_high, w_low, unscale = cut(w)
            # As `multiply`, but each step has its own scales. Undoing them fuses with the addition.
            b_step = tl.dot(w_low, high.T)
            b_step = tl.dot(w_high, low.T, b_step)
            b_step = tl.dot(w_high, high.T, b_step)
            acc += b_step * unscale[:, None]
        else:
            w_low = d_w_low.load([c0, i * BLOCK_K]) if PLANES == 2 else w
            acc = multiply(w, w_low, high.T, low.T, acc, PLANES, ACC)
    if KEEPS_INF and PLANES == 2:  # noqa: SIM102 (decided when compiling; the other when running)
        # An infinity times a low plane has an arbitrary sign or is NaN. The product of the high planes alone is right.
        if tl.max(tl.max(tl.where(tl.abs(acc) < float("inf"), 0, 1), axis=1), axis=0) > 0:
            alone = tl.zeros([BLOCK_C, BLOCK_M], ACC)
            for i in tl.range(0, tl.cdiv(K, BLOCK_K)):
                w_high = weight_block(d_w, c0, i * BLOCK_K, IS_WEIGHT_TURNED)
                if IS_WEIGHT_CUT:
                    w_high = cut_high(w_high)
                alone = tl.dot(w_high, d_x.load([row0, i * BLOCK_K]).T, alone, out_dtype=ACC)
            acc = tl.where(tl.abs(alone) < float("inf"), acc, alone)
    o_c = c0 + tl.arange(0, BLOCK_C)
    m_c = o_c < C_OUT
    o_s = row0 + tl.arange(0, BLOCK_M)
    m_s = o_s < S
    if IS_SCALED:
        acc = acc * tl.load(p_x_unscale + o_s, mask=m_s, other=0.0)[None, :]
        if not IS_WEIGHT_CUT:
            acc = acc * tl.load(p_w_unscale + o_c, mask=m_c, other=0.0)[:, None]
    epilogue(
        acc, o_c, m_c, o_s, m_s, i_n, i_b, i_tile, p_y, p_mean, p_m2, p_count,
        a0, a1, a2, a3, a4, a5, C_OUT, S, TILES, STEPS_FN, STORE, MOMENTS,
        IS_CHANNELS_LAST, USES_INT64, IS_EVEN_C, 1, ACC,
    )  # fmt: skip
