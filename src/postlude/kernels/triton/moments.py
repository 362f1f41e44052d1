"""The end of a chain that needs only moments: partial moments in, one number per sample or channel out.

Names are as in normalize.py. MOMENTS_FN is one composed function (see steps.py). All arithmetic is in float64: there
are few numbers, and the mean of a norm's result is a small difference of large numbers.
"""

import triton
import triton.language as tl

MOST_CHANNELS = 256  # a program holds all channels of a sample, and a [BLOCK_C, BLOCK_C] block for a norm's groups


@triton.jit
def group_mean(x, o_c, C_PER_GROUP: tl.constexpr):
    """[BLOCK_C], the mean over each channel's group of C_PER_GROUP neighbours."""
    if C_PER_GROUP == 1:
        return x
    o_g = o_c // C_PER_GROUP
    # Selected with `where`, not multiplied by 0 or 1, so that a NaN stays in its group. Lanes past the last channel
    # form groups of their own.
    return tl.sum(tl.where(o_g[:, None] == o_g[None, :], x[None, :], 0.0), axis=1) / C_PER_GROUP


@triton.jit
def normalize_moments(mean, var, o_c, C_PER_GROUP: tl.constexpr, eps: tl.constexpr):
    """The moments [BLOCK_C] after a norm without weight and bias."""
    mean = mean - group_mean(mean, o_c, C_PER_GROUP)
    scale = 1.0 / tl.sqrt(group_mean(var + mean * mean, o_c, C_PER_GROUP) + eps)
    return mean * scale, var * (scale * scale)


@triton.jit
def combine_chunks(p_mean, p_m2, p_count, i_n, o_c, CHUNKS, C, HAS_M2, BLOCK_C, BLOCK_PARTS):
    """A sample's number of positions, and the mean and variance of its channels [BLOCK_C].

    Chan's formula, tile by tile in a fixed order.
    """
    count = tl.zeros([], tl.float64)
    mean = tl.zeros([BLOCK_C], tl.float64)
    m2 = tl.zeros([BLOCK_C], tl.float64)
    for start in range(0, CHUNKS, BLOCK_PARTS):
        o_k = start + tl.arange(0, BLOCK_PARTS)
        b_n = tl.load(p_count + i_n * CHUNKS + o_k, mask=o_k < CHUNKS, other=0.0).to(tl.float64)  # [BLOCK_PARTS]
        b_count = tl.sum(b_n)
        o_x = (i_n * C + o_c)[:, None] * CHUNKS + o_k[None, :]  # [BLOCK_C, BLOCK_PARTS]
        m_x = (o_c < C)[:, None] & (b_n > 0)[None, :]
        b_mean = tl.load(p_mean + o_x, mask=m_x, other=0.0).to(tl.float64)
        if HAS_M2:
            b_m2 = tl.load(p_m2 + o_x, mask=m_x, other=0.0).to(tl.float64)
            b_all = tl.sum(b_mean * b_n[None, :], axis=1) / tl.maximum(b_count, 1.0)  # [BLOCK_C]
            b_diff = b_mean - b_all[:, None]
            delta = b_all - mean
            weight = b_count / tl.maximum(count + b_count, 1.0)
            m2 += tl.sum(b_m2 + b_n[None, :] * b_diff * b_diff, axis=1) + delta * delta * count * weight
            mean += delta * weight
        else:
            mean += tl.sum(b_mean, axis=1)
        count += b_count
    return count, mean if HAS_M2 else mean / count, m2 / count


@triton.jit
def finish_moments_kernel(
    p_mean,  # [N, C, CHUNKS]; sums where not HAS_M2
    p_m2,  # [N, C, CHUNKS], read where HAS_M2
    p_count,  # [N, CHUNKS]: positions of a chunk; the moments of an empty chunk are not read
    p_out,  # [N, C] where IS_OVER_SPACE, else [N], out
    a0, a1, a2, a3, a4, a5,
    CHUNKS,
    C: tl.constexpr, MOMENTS_FN: tl.constexpr,
    HAS_M2: tl.constexpr,  # False: only sums are needed; a sum keeps an infinity, moments would turn it into NaN
    IS_OVER_SPACE: tl.constexpr,
    BLOCK_C: tl.constexpr,  # at least C
    BLOCK_PARTS: tl.constexpr,  # chunks at a time
):  # fmt: skip
    i_n = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    count, mean, var = combine_chunks(p_mean, p_m2, p_count, i_n, o_c, CHUNKS, C, HAS_M2, BLOCK_C, BLOCK_PARTS)
    result = MOMENTS_FN(mean, var, count, o_c, m_c, C, a0, a1, a2, a3, a4, a5).to(p_out.dtype.element_ty)
    if IS_OVER_SPACE:
        tl.store(p_out + i_n * C + o_c, result, mask=m_c)
    else:
        tl.store(p_out + i_n, result)
