"""The backward pass of a chain that ends in norm → mean or sum, from moments alone, in float64.

A sample's channel has values v with mean m and a variance over `positions`. Its group has mean M and variance V. The
reduction reads y = γ·(m − M)·r + β with r = 1 / √(V + eps). The gradient at v is affine in v,

    dv = dm / positions + (v − m)·2·dvar / positions,

and the table holds its shift and slope, for a v without the convolution's bias.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.moments import combine_chunks


@triton.jit
def combined_moments_kernel(
    p_mean,  # [N, C, CHUNKS]
    p_m2,
    p_count,  # [N, CHUNKS]
    p_out,  # [2, N, C] float64: means and variances, out
    N, CHUNKS,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK_C)
    _, mean, var = combine_chunks(p_mean, p_m2, p_count, i_n, o_c, CHUNKS, C, True, BLOCK_C, BLOCK_PARTS)
    tl.store(p_out + i_n * C + o_c, mean, mask=o_c < C)
    tl.store(p_out + (N + i_n) * C + o_c, var, mask=o_c < C)


@triton.jit
def power_of_two(exponent):
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def store_as(pointer, value, mask):
    """Stores in the pointer's dtype. Via float32, because Triton's interpreter cannot convert float64 to 16 bits."""
    if pointer.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def moments_gradient_kernel(
    p_mean, p_var,  # [N, C] float64
    p_dy,  # [N, C] where IS_OVER_SPACE, else [N]
    p_gamma,  # [C], read where HAS_GAMMA
    p_bias,  # [C], the convolution's, read where HAS_BIAS
    p_table,  # [N, C, 4] float32: shift and slope times 2^e, e, 0, out
    p_dgamma,  # [C], out where HAS_GAMMA
    p_dbeta,  # [C], out where HAS_BETA
    p_dbias,  # [C], out where HAS_BIAS
    N, S,
    C: tl.constexpr,
    C_PER_GROUP: tl.constexpr,
    eps: tl.constexpr, IS_OVER_SPACE: tl.constexpr, IS_SUM: tl.constexpr,
    HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,  # at least C_PER_GROUP
    BLOCK_SAMPLES: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(0)
    o_p = tl.arange(0, BLOCK_C)
    o_c = i_g * C_PER_GROUP + o_p  # [BLOCK_C]
    m_c = o_p < C_PER_GROUP
    positions = tl.zeros([], tl.float64) + S
    gamma = tl.full([BLOCK_C], 1.0, tl.float64)
    bias = tl.zeros([BLOCK_C], tl.float64)
    if HAS_GAMMA:
        gamma = tl.load(p_gamma + o_c, mask=m_c, other=0.0).to(tl.float64)
    if HAS_BIAS:
        bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float64)
    dgamma = tl.zeros([BLOCK_C], tl.float64)
    dbeta = tl.zeros([BLOCK_C], tl.float64)
    dbias = tl.zeros([BLOCK_C], tl.float64)
    for start in range(0, N, BLOCK_SAMPLES):
        o_n = start + tl.arange(0, BLOCK_SAMPLES)
        mask = (o_n < N)[:, None] & m_c[None, :]  # [BLOCK_SAMPLES, BLOCK_C]
        o_x = o_n.to(tl.int64)[:, None] * C + o_c[None, :]
        mean = tl.load(p_mean + o_x, mask=mask, other=0.0)
        var = tl.load(p_var + o_x, mask=mask, other=0.0)
        if IS_OVER_SPACE:
            dy = tl.load(p_dy + o_x, mask=mask, other=0.0).to(tl.float64)
        else:
            dy = tl.load(p_dy + o_n, mask=o_n < N, other=0.0).to(tl.float64)[:, None]
            dy = tl.where(mask, dy if IS_SUM else dy / C, 0.0)
        if IS_SUM:
            dy = dy * positions
        apart = tl.where(mask, mean - (tl.sum(mean, axis=1) / C_PER_GROUP)[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(var + apart * apart, axis=1) / C_PER_GROUP + eps)
        rstd = tl.where(o_n < N, rstd, 0.0)  # [BLOCK_SAMPLES]; past the last sample the variance is 0
        dgamma += tl.sum(dy * (apart * rstd[:, None]), axis=0)
        dbeta += tl.sum(dy, axis=0)
        da = dy * gamma[None, :]
        dspread = -0.5 * rstd * rstd * rstd * tl.sum(da * apart, axis=1)
        dmean = (da - (tl.sum(da, axis=1) / C_PER_GROUP)[:, None]) * rstd[:, None]
        dmean = tl.where(mask, dmean + apart * (2.0 * dspread / C_PER_GROUP)[:, None], 0.0)
        dbias += tl.sum(dmean, axis=0)
        # |v − mean| is at most √(variance · positions), so the power of two is known without reading v.
        slope = tl.zeros_like(dmean) + (2.0 * dspread / C_PER_GROUP / positions)[:, None]
        shift = dmean / positions - slope * (mean - bias[None, :])
        bound = tl.abs(dmean) / positions + tl.abs(slope) * tl.sqrt(tl.maximum(var, 0.0) * positions)
        bits = bound.to(tl.int64, bitcast=True)
        power = 1037 - (bits >> 52)  # scales the bound to 2¹⁴…2¹⁵
        power = tl.where(bits == 0, 100, tl.minimum(tl.maximum(power, -100), 100))
        scale = power_of_two(power)
        o_t = p_table + o_x * 4
        tl.store(o_t, (shift * scale).to(tl.float32), mask=mask)
        tl.store(o_t + 1, (slope * scale).to(tl.float32), mask=mask)
        tl.store(o_t + 2, power.to(tl.float32), mask=mask)
        tl.store(o_t + 3, tl.zeros_like(dmean).to(tl.float32), mask=mask)
    if HAS_GAMMA:
        store_as(p_dgamma + o_c, dgamma, m_c)
    if HAS_BETA:
        store_as(p_dbeta + o_c, dbeta, m_c)
    if HAS_BIAS:
        store_as(p_dbias + o_c, dbias, m_c)
