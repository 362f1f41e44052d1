"""The vocabulary on the device: one function per word, on values in the accumulator's dtype."""

import triton
import triton.language as tl


@triton.jit
def relu(x):
    # A plain maximum turns NaN into 0 on the GPU; PyTorch's relu keeps it.
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp_min(x, bound: tl.constexpr):
    # A bare number would become fp32 here, whatever x is.
    return tl.maximum(x, tl.full(x.shape, bound, x.dtype), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def leaky_relu(x, slope: tl.constexpr):
    return tl.where(x > 0, x, x * slope)


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
def add(x, y):
    return x + y


@triton.jit
def mul(x, y):
    return x * y
