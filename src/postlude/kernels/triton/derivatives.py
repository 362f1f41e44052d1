"""The derivative of each word on the device: from the gradient g of the result to the gradient of the operand x.

Ties and NaN follow PyTorch, word by word. relu passes nothing at 0 and g at NaN; clamp passes g at its bounds and
nothing at NaN; hardtanh does the opposite of clamp; leaky_relu uses its slope for both. A function takes the result v
instead of x where v alone determines the derivative.
"""

import triton
import triton.language as tl


@triton.jit
def nothing(g):
    return tl.zeros_like(g)


@triton.jit
def relu_gradient(g, x):
    return tl.where(x <= 0, 0.0, g)


@triton.jit
def clamp_min_gradient(g, x, bound: tl.constexpr):
    # The bound in x's dtype: rounded to fp32 it would miss a tie in float64.
    return tl.where(x >= tl.full(x.shape, bound, x.dtype), g, 0.0)


@triton.jit
def clamp_max_gradient(g, x, bound: tl.constexpr):
    return tl.where(x <= tl.full(x.shape, bound, x.dtype), g, 0.0)


@triton.jit
def clamp_gradient(g, x, low: tl.constexpr, high: tl.constexpr):
    return clamp_min_gradient(clamp_max_gradient(g, x, high), x, low)


@triton.jit
def hardtanh_gradient(g, x, low: tl.constexpr, high: tl.constexpr):
    outside = (x <= tl.full(x.shape, low, x.dtype)) | (x >= tl.full(x.shape, high, x.dtype))
    return tl.where(outside, 0.0, g)


@triton.jit
def leaky_relu_gradient(g, x, slope: tl.constexpr):
    return tl.where(x > 0, g, g * slope)


@triton.jit
def elu_gradient(g, x, alpha: tl.constexpr, scale: tl.constexpr, input_scale: tl.constexpr):
    slope: tl.constexpr = alpha * scale * input_scale
    negative = tl.exp(x * tl.full(x.shape, input_scale, x.dtype)) * tl.full(x.shape, slope, x.dtype)
    return g * tl.where(x <= 0, negative, tl.full(x.shape, scale, x.dtype))


@triton.jit
def silu_gradient(g, x):
    sigmoid = 1.0 / (1.0 + tl.exp(-x))
    return g * (sigmoid * (1.0 + x * (1.0 - sigmoid)))


@triton.jit
def gelu_gradient(g, x):
    below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / √(2π)
    return g * (below + x * density)


@triton.jit
def gelu_tanh_gradient(g, x):
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    share = 1.0 / (1.0 + tl.exp(-2.0 * inner))  # gelu is x · share, and share' = 2 · share · (1 − share) · inner'
    slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return g * (share + 2.0 * x * share * (1.0 - share) * slope)


@triton.jit
def mish_gradient(g, x):
    w = tl.exp(-tl.abs(x))
    n = tl.where(x > 0, 1.0 + 2.0 * w, w * (w + 2.0))
    rest = tl.where(x > 0, 2.0 * w * w, 2.0)
    share = n / (n + rest)  # tanh(softplus(x)), as in the word itself; 1 − share² = rest · (2n + rest) / (n + rest)²
    sigmoid = tl.where(x > 0, 1.0, w) / (1.0 + w)
    return g * (share + x * sigmoid * (rest * (n + n + rest) / ((n + rest) * (n + rest))))


@triton.jit
def hardswish_gradient(g, x):
    return tl.where(x <= -3.0, 0.0, tl.where(x < 3.0, g * (x / 3.0 + 0.5), g))


@triton.jit
def hardsigmoid_gradient(g, x):
    return tl.where((x > -3.0) & (x < 3.0), g / 6.0, 0.0)


@triton.jit
def softplus_gradient(g, x, beta: tl.constexpr, threshold: tl.constexpr):
    scaled = x * tl.full(x.shape, beta, x.dtype)
    return tl.where(scaled > threshold, g, g / (1.0 + tl.exp(-scaled)))


@triton.jit
def tanh_gradient(g, v):
    return g * (1.0 - v * v)


@triton.jit
def sigmoid_gradient(g, v):
    return g * ((1.0 - v) * v)


@triton.jit
def abs_gradient(g, x):
    return tl.where(x > 0, g, tl.where(x < 0, -g, 0.0))  # nothing at 0 and at NaN


@triton.jit
def sqrt_gradient(g, v):
    return g / (2.0 * v)


@triton.jit
def reciprocal_gradient(g, v):
    return -g * (v * v)


@triton.jit
def pow_gradient(g, x, exponent: tl.constexpr):
    power = tl.full(x.shape, exponent, x.dtype)
    for _ in tl.static_range(exponent - 1):
        power = power * x
    return g * power


@triton.jit
def maximum_gradient(g, x, y):
    y = tl.zeros(x.shape, x.dtype) + y  # in x's dtype: a Python number is rounded to fp32 and could miss a tie
    return tl.where(x == y, g * 0.5, tl.where(x < y, 0.0, g))


@triton.jit
def minimum_gradient(g, x, y):
    y = tl.zeros(x.shape, x.dtype) + y
    return tl.where(x == y, g * 0.5, tl.where(x > y, 0.0, g))


@triton.jit
def prelu_gradient(g, x, weight):
    return tl.where(x > 0, g, g * weight)


@triton.jit
def prelu_weight_gradient(g, x):
    return tl.where(x > 0, 0.0, g * x)
