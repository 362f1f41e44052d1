"""batch_norm in training: combines over the batch what other passes computed per sample and channel.

Every other kernel reads one number per sample and group. These kernels therefore write each channel's number once for
every sample, so that no other kernel needs a case for batch_norm.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.normalize import combined_parts


@triton.jit
def combine_batch_kernel(
    p_mean,  # [N, C, CHUNKS]: partial moments
    p_m2,  # [N, C, CHUNKS]
    p_count,  # [N, CHUNKS]
    p_batch_mean, p_batch_rstd,  # [N, C], out
    p_running_mean, p_running_var,  # [C], in and out where HAS_RUNNING_STATS
    N, C, CHUNKS,
    count,  # values of a channel
    eps,
    momentum: tl.constexpr, HAS_RUNNING_STATS: tl.constexpr, BLOCK_PARTS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    i_c = tl.program_id(0)
    o_part = tl.arange(0, BLOCK_PARTS)
    p_mean += i_c * CHUNKS
    p_m2 += i_c * CHUNKS
    parts, stride = N * CHUNKS, C * CHUNKS
    mean, squares = combined_parts(p_mean, p_m2, p_count, parts, CHUNKS, stride, count, True, BLOCK_PARTS, ACC)
    rstd = 1.0 / tl.sqrt(squares / count + eps)
    for start in range(0, N, BLOCK_PARTS):
        o = start + o_part
        tl.store(p_batch_mean + o * C + i_c, tl.zeros([BLOCK_PARTS], ACC) + mean, mask=o < N)
        tl.store(p_batch_rstd + o * C + i_c, tl.zeros([BLOCK_PARTS], ACC) + rstd, mask=o < N)
    if HAS_RUNNING_STATS:
        old_mean = tl.load(p_running_mean + i_c).to(ACC)
        old_var = tl.load(p_running_var + i_c).to(ACC)
        new_mean = (1.0 - momentum) * old_mean + momentum * mean
        new_var = (1.0 - momentum) * old_var + momentum * (squares / (count - 1.0))
        tl.store(p_running_mean + i_c, new_mean.to(p_running_mean.dtype.element_ty))
        tl.store(p_running_var + i_c, new_var.to(p_running_var.dtype.element_ty))


@triton.jit
def combine_batch_sums_kernel(
    p_sums,  # [2 or more, N, C, CHUNKS]: sums of dn, and of dn · x̂ (see gradient.py)
    p_gamma,  # [C], not read without HAS_GAMMA
    p_a,  # [N, C], out: the mean of γ · dn over the batch
    p_b,  # [N, C], out: the mean of γ · dn · x̂
    N, C, S, CHUNKS,
    SUM_STRIDE,  # from one of the sums to the next: N·C·CHUNKS
    HAS_GAMMA: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    i_c = tl.program_id(0)
    o_part = tl.arange(0, BLOCK_PARTS)
    # Partial sums of opposite signs may be far larger than their total. They are few, so float64 costs nothing.
    a = tl.zeros([BLOCK_PARTS], tl.float64)
    b = tl.zeros([BLOCK_PARTS], tl.float64)
    for start in range(0, N * CHUNKS, BLOCK_PARTS):
        o = start + o_part
        m = o < N * CHUNKS
        o_x = (o // CHUNKS * C + i_c) * CHUNKS + o % CHUNKS
        a += tl.load(p_sums + o_x, mask=m, other=0.0).to(tl.float64)  # [BLOCK_PARTS]
        b += tl.load(p_sums + SUM_STRIDE + o_x, mask=m, other=0.0).to(tl.float64)
    scale = 1.0 / (tl.cast(N, tl.float64) * S)
    if HAS_GAMMA:
        scale *= tl.load(p_gamma + i_c).to(tl.float64)
    mean_a = (tl.sum(a) * scale).to(p_a.dtype.element_ty)
    mean_b = (tl.sum(b) * scale).to(p_b.dtype.element_ty)
    for start in range(0, N, BLOCK_PARTS):
        o = start + o_part
        tl.store(p_a + o * C + i_c, tl.zeros([BLOCK_PARTS], p_a.dtype.element_ty) + mean_a, mask=o < N)
        tl.store(p_b + o * C + i_c, tl.zeros([BLOCK_PARTS], p_b.dtype.element_ty) + mean_b, mask=o < N)
