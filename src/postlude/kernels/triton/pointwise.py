"""The vocabulary on the device: one function per word, on values in the accumulator's dtype.

Where it matters, constants are made in x's dtype: Triton may round a Python number to fp32, whatever x is.

In a convolution's epilogue nothing overlaps with a word, so its instructions count. In fp32 `tl.exp` takes five of them
and a division eight; `exp` and `inverse` take two each and are as accurate.
"""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    return tl.exp2(x * tl.full(x.shape, 1.4426950408889634, x.dtype))


@triton.jit
def inverse(x):
    """1 / x, for x of about 1 or more, infinity included."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def quotient(x, y):
    """x / y to nearest; a plain division errs to one side for one y, by 0.1 ulp, which sums over a batch collect."""
    q = x / y
    return q + tl.fma(-q, y, x) / y


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
    """exp(x) − 1 for x ≤ 0, accurate for small results: a series in x / 4, then e → e(e + 2) twice, which doubles x."""
    y = tl.where(x > -1.0, x, 0.0) * 0.25
    terms: tl.constexpr = 14 if x.dtype == tl.float64 else 8
    total = tl.full(x.shape, 1.0, x.dtype)
    for i in tl.static_range(terms - 1):
        total = 1.0 + total * y * tl.full(x.shape, 1.0 / (terms - i), x.dtype)
    e = total * y
    e = e * (e + 2.0)
    e = e * (e + 2.0)
    return tl.where(x > -1.0, e, exp(x) - 1.0)


@triton.jit
def log1p_of_exp(x):
    """log(1 + exp(x)) for x ≤ 0, by the series of atanh, accurate for small results."""
    w = exp(x)
    s = w * inverse(2.0 + w)
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
    return x * inverse(1.0 + exp(-x))


@triton.jit
def normal_tail(x):
    """The upper tail of the normal distribution for x ≥ 0, in fp32: 2 to the power of a polynomial, within 5e-8."""
    power = -2.096467236891594e-06 * x + 3.06613493056809e-05
    power = power * x - 0.00014548826188777109
    power = power * x - 0.00023314512970133206
    power = power * x + 0.007185839200523551
    power = power * x - 0.05257823487811219
    power = power * x - 0.4591820386092508
    power = power * x - 1.1511082925033544
    return tl.exp2(power * x - 1.0)


@triton.jit
def gelu(x):
    if x.dtype == tl.float64:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tail = normal_tail(tl.abs(x))
        share = tl.where(x > 0, 1.0 - tail, tail)
    return x * share


@triton.jit
def gelu_tanh(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * inverse(1.0 + exp(-2.0 * inner))  # 0.5·(1 + tanh(u)) = 1 / (1 + exp(−2u))


@triton.jit
def mish(x):
    # tanh(log(1 + e)) = n / (n + 2) with n = e² + 2e; the quotient rounds to 1 long before e² overflows.
    e = exp(tl.minimum(x, 20.0))
    n = e * (e + 2.0)
    return x * (n * inverse(n + 2.0))


@triton.jit
def sixth(x):
    return x * tl.full(x.shape, 1.0 / 6.0, x.dtype)


@triton.jit
def hardswish(x):
    return sixth(x * clamp(x + 3.0, 0.0, 6.0))


@triton.jit
def hardsigmoid(x):
    return sixth(clamp(x + 3.0, 0.0, 6.0))


@triton.jit
def softplus(x, beta: tl.constexpr, threshold: tl.constexpr):
    scaled = x * tl.full(x.shape, beta, x.dtype)
    smooth = tl.where(scaled > 0, scaled, 0.0) + log1p_of_exp(-tl.abs(scaled))
    return tl.where(scaled > threshold, x, smooth / tl.full(x.shape, beta, x.dtype))


@triton.jit
def small_tanh(x):
    """tanh in fp32 for |x| < 0.75: x plus an odd polynomial, relative error within 7e-8."""
    s = x * x
    power = 0.0017441400599688974 * s - 0.007669224881092987
    power = power * s + 0.02145943573139818
    power = power * s - 0.05389480318998306
    power = power * s + 0.13332719589067887
    power = power * s - 0.3333331614173581
    return x + x * (s * power)


@triton.jit
def tanh(x):
    if x.dtype == tl.float64:
        e = expm1(-2.0 * tl.abs(x))
        return tl.where(x < 0, e, -e) / (e + 2.0)
    large = 1.0 - 2.0 * inverse(1.0 + exp(2.0 * tl.abs(x)))
    return tl.where(tl.abs(x) < 0.75, small_tanh(x), tl.where(x < 0, -large, large))


@triton.jit
def sigmoid(x):
    return inverse(1.0 + exp(-x))


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
    """The variance after batch_norm, from a variance x before it."""
    return x * (weight * weight) / (var + eps)
