"""The vocabulary's derivatives on the device: the gradient g of a word's result made one of its operand x.

At ties and NaN they follow PyTorch, word by word: relu passes nothing at 0 and g at NaN, clamp_min passes g at its
bound and nothing at NaN, leaky_relu takes its slope at both.
"""

import triton
import triton.language as tl


@triton.jit
def relu_gradient(g, x):
    return tl.where(x <= 0, 0.0, g)


@triton.jit
def clamp_min_gradient(g, x, bound: tl.constexpr):
    # The bound in x's dtype: a tie in float64 must not be missed by fp32's rounding of it.
    return tl.where(x >= tl.full(x.shape, bound, x.dtype), g, 0.0)


@triton.jit
def leaky_relu_gradient(g, x, slope: tl.constexpr):
    return tl.where(x > 0, g, g * slope)


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
