"""The vocabulary on the device: one function per word, on values in the accumulator's dtype.

Numbers are made in x's dtype where it matters: a bare one may pass through fp32, whatever x is.
"""

import triton
import triton.language as tl


@triton.jit
def relu(x):
    # A plain maximum turns NaN into 0 on the GPU; PyTorch's relu keeps it.
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp_min(x, bound: tl.constexpr):
    return tl.maximum(x, tl.full(x.shape, bound, x.dtype), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp_max(x, bound: tl.constexpr):
    return tl.minimum(x, tl.full(x.shape, bound, x.dtype), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp(x, low: tl.constexpr, high: tl.constexpr):
    return clamp_max(clamp_min(x, low), high)


@triton.jit
def hardtanh(x, low: tl.constexpr, high: tl.constexpr):
    return clamp(x, low, high)


@triton.jit
def leaky_relu(x, slope: tl.constexpr):
    return tl.where(x > 0, x, x * slope)


@triton.jit
def expm1(x):
    """exp(x) − 1 for x ≤ 0: small results keep their digits. The series is of x / 4; e(e + 2) doubles its argument."""
    y = tl.where(x > -1.0, x, 0.0) * 0.25
    terms: tl.constexpr = 14 if x.dtype == tl.float64 else 8
    total = tl.full(x.shape, 1.0, x.dtype)
    for i in tl.static_range(terms - 1):
        total = 1.0 + total * y * tl.full(x.shape, 1.0 / (terms - i), x.dtype)
    e = total * y
    e = e * (e + 2.0)
    e = e * (e + 2.0)
    return tl.where(x > -1.0, e, tl.exp(x) - 1.0)


@triton.jit
def log1p_of_exp(x):
    """log(1 + exp(x)) for x ≤ 0, by the series of atanh: small results keep their digits."""
    w = tl.exp(x)
    s = w / (2.0 + w)
    terms: tl.constexpr = 17 if x.dtype == tl.float64 else 8
    square = s * s
    total = tl.zeros(x.shape, x.dtype)
    for i in tl.static_range(terms):
        total = total * square + tl.full(x.shape, 1.0 / (2 * (terms - i) - 1), x.dtype)
    return 2.0 * s * total


@triton.jit
def elu(x, alpha: tl.constexpr, scale: tl.constexpr, input_scale: tl.constexpr):
    negative = expm1(tl.where(x < 0, x, 0.0) * tl.full(x.shape, input_scale, x.dtype))
    slope: tl.constexpr = alpha * scale
    return tl.where(x < 0, negative * tl.full(x.shape, slope, x.dtype), x * tl.full(x.shape, scale, x.dtype))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * inner))  # 0.5·(1 + tanh(u)) = 1 / (1 + exp(−2u))


@triton.jit
def mish(x):
    # tanh(log(1 + e)) = n / (n + 2) with n = e² + 2e; for x > 0 both are divided by e², which may be too large.
    w = tl.exp(-tl.abs(x))
    n = tl.where(x > 0, 1.0 + 2.0 * w, w * (w + 2.0))
    return x * (n / (n + tl.where(x > 0, 2.0 * w * w, 2.0)))


@triton.jit
def hardswish(x):
    return x * clamp(x + 3.0, 0.0, 6.0) / 6.0


@triton.jit
def hardsigmoid(x):
    return clamp(x + 3.0, 0.0, 6.0) / 6.0


@triton.jit
def softplus(x, beta: tl.constexpr, threshold: tl.constexpr):
    scaled = x * tl.full(x.shape, beta, x.dtype)
    smooth = tl.where(scaled > 0, scaled, 0.0) + log1p_of_exp(-tl.abs(scaled))
    return tl.where(scaled > threshold, x, smooth / tl.full(x.shape, beta, x.dtype))


@triton.jit
def tanh(x):
    """Half the instructions of `expm1`: small results keep their digits by a polynomial, others by 1 − exp(−2|x|)."""
    if x.dtype == tl.float64:
        e = expm1(-2.0 * tl.abs(x))
        return tl.where(x < 0, e, -e) / (e + 2.0)
    u = x * x
    p = ((-0.005704986 * u + 0.020639087) * u - 0.053739715) * u + 0.13331442
    small = x + x * u * (p * u - 0.33333282)  # within 5e-9 of tanh(x), relatively, up to the bound
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0, -large, large))  # a NaN stays


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def abs(x):
    return tl.abs(x)


@triton.jit
def sqrt(x):
    return tl.sqrt(x)


@triton.jit
def reciprocal(x):
    return 1.0 / x


@triton.jit
def pow(x, exponent: tl.constexpr):
    result = x
    for _ in tl.static_range(exponent - 1):
        result = result * x
    return result


@triton.jit
def detach(x):
    return x


@triton.jit
def add(x, y):
    return x + y


@triton.jit
def sub(x, y):
    return x - y


@triton.jit
def rsub(x, y):
    return y - x


@triton.jit
def mul(x, y):
    return x * y


@triton.jit
def div(x, y):
    return x / y


@triton.jit
def rdiv(x, y):
    return y / x


@triton.jit
def maximum(x, y):
    return tl.maximum(x, tl.zeros(x.shape, x.dtype) + y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    return tl.minimum(x, tl.zeros(x.shape, x.dtype) + y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def prelu(x, weight):
    return tl.where(x > 0, x, x * weight)


@triton.jit
def batch_norm_slope(var, weight, eps: tl.constexpr):
    return weight / tl.sqrt(var + eps)


@triton.jit
def batch_norm(x, mean, var, weight, bias, eps: tl.constexpr):
    return (x - mean) * batch_norm_slope(var, weight, eps) + bias


@triton.jit
def batch_norm_variance(x, var, weight, eps: tl.constexpr):
    """What it makes of a variance x."""
    return x * (weight * weight) / (var + eps)
