"""Gradients of steps over the rows of a block [ROWS, LENGTH]: softmax, or a reduction to one number per row.

g is the gradient of the result, x the operand, v the result; for a reduction g and v are [ROWS, 1]. Lanes outside m_x
are masked out. Infinities and NaN follow PyTorch's formulas.
"""

import triton
import triton.language as tl

from postlude.kernels.triton.channels import row_largest, row_place
from postlude.kernels.triton.pointwise import exp
from postlude.kernels.triton.rows import row_sum


@triton.jit
def spread(g, m_x):
    """Broadcasts a row's number to its elements."""
    return tl.where(m_x, g, 0.0)


@triton.jit
def logsumexp_share(g, x, v, m_x):
    return tl.where(m_x, g * exp(x - v), 0.0)


@triton.jit
def largest_share(g, x, m_x):
    """The gradient of amax: equal elements share it. The largest is found again, because another kernel may have
    rounded the saved one differently, so that no element equals it."""
    b_x = tl.where(m_x, x, float("-inf"))
    is_largest = (b_x == row_largest(b_x)[:, None]) & m_x
    count = tl.sum(tl.where(is_largest, 1.0, 0.0).to(x.dtype), axis=1)[:, None]
    return tl.where(is_largest, 1.0, 0.0).to(x.dtype) * (g / count)


@triton.jit
def smallest_share(g, x, m_x):
    return largest_share(g, -x, m_x)


@triton.jit
def chosen_share(g, place, o_c):
    """The gradient of max and min: all of it goes to the element that was chosen."""
    return tl.where(o_c == place, g, 0.0)


@triton.jit
def max_place(x, o_c, m_x):
    """The first channel that holds its row's largest, [ROWS, 1]."""
    b_x = tl.where(m_x, x, float("-inf"))
    return row_place(b_x, row_largest(b_x), o_c)[:, None]


@triton.jit
def min_place(x, o_c, m_x):
    return max_place(-x, o_c, m_x)


@triton.jit
def softmax_share(g, v, m_x):
    return v * (g - row_sum(g * v, m_x))


@triton.jit
def log_softmax_share(g, v, m_x):
    return g - exp(v) * row_sum(g, m_x)


@triton.jit
def normalize_share(g, x, v, m_x, eps):
    """The gradient of x / max(‖x‖, eps): its component along the row is removed, unless eps is larger than ‖x‖."""
    length = tl.sqrt(row_sum(x * x, m_x))
    return tl.where(length < eps, g / eps, (g - v * row_sum(g * v, m_x)) / length)


@triton.jit
def in_first(g, o_c):
    """Keeps a row's number in its first element only, so that sums over a row count it once."""
    return tl.where(o_c == 0, g, 0.0)


@triton.jit
def of_positions(p, x, base, o_x, C: tl.constexpr, S: tl.constexpr, IS_CHANNELS_LAST: tl.constexpr):
    """A number [N, S] for each position of a tile that has all channels: [BLOCK_S, 1] in x's dtype."""
    o_s = tl.min(o_x, axis=1)  # the first channel's place
    if IS_CHANNELS_LAST:
        o_s = o_s // C
    return tl.load(p + base // C + o_s, mask=o_s < S, other=0.0)[:, None].to(x.dtype)
