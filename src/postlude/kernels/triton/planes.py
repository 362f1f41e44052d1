"""Half-precision planes: numbers cut into fp16 and what is left over, so that tensor cores multiply them exactly.

A number times a power of two is cut into fp16(number) and, where two planes are kept, fp16 of what is left. The power
brings the largest magnitude to 2¹⁴…2¹⁵, per channel of the input and per output channel of the weight; the weight takes
the input's powers back out, so only its own remain to be undone: p_unscale.

Where KEEPS_INF, no norm follows, and an infinity must come out of the product as it would of PyTorch's convolution. In
one plane it does by itself, but for a number that rounds to zero beside it: `not_zero`. In two planes the product of
the high ones alone tells what becomes of it, which is computed where `p_largest` says behind its last channel that an
infinity was met.
"""

import triton
import triton.language as tl


@triton.jit
def finite_magnitude(x):
    """|x|, and 0 where x is not finite: an infinity must not set the scale of a whole channel."""
    magnitude = tl.abs(x.to(tl.float32))
    return tl.where(magnitude < float("inf"), magnitude, 0.0)  # also 0 for NaN


@triton.jit
def scale_for(largest):
    """The power of two that brings `largest` to 2¹⁴…2¹⁵; 1 for 0. Clamped where the power itself would overflow."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.where(largest == 0.0, 14, tl.maximum(exponent, -100))
    return ((127 + 14 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rest_of(x, high):
    """What the high plane leaves over of x; 0 for an infinity, which would be NaN."""
    rest = x - high.to(tl.float32)
    return tl.where(tl.abs(rest) < float("inf"), rest, 0.0)


@triton.jit
def not_zero(x, scaled):
    """`scaled`, with the smallest number of x's sign where half precision would make it zero and x is not: infinity
    times zero is NaN. Before the conversion, which then takes two numbers at a time."""
    tiny = tl.where(x < 0.0, -5.9604644775390625e-08, 5.9604644775390625e-08)  # 2⁻²⁴
    return tl.where((tl.abs(scaled) < 5.9604644775390625e-08) & (x != 0.0), tiny, scaled)


@triton.jit
def flag_infinity(p_flag, x):
    """Leaves a 1 where x has an infinity. Ordinarily nothing is written."""
    if tl.max(tl.abs(x.to(tl.float32))) == float("inf"):
        tl.atomic_max(p_flag, 1, sem="relaxed")


@triton.jit
def scale_of(p_largest, o_c, m_c):
    """The scale of each channel, from the bits of its largest magnitude."""
    return scale_for(tl.load(p_largest + o_c, mask=m_c, other=0).to(tl.float32, bitcast=True))


@triton.jit
def high_plane(given, scaled, KEEPS_INF: tl.constexpr, dtype: tl.constexpr):
    """The high plane of a scaled block; `given` is the same before its scale."""
    return (not_zero(given, scaled) if KEEPS_INF else scaled).to(dtype)


@triton.jit
def store_planes(p_high, p_low, o_out, high, scaled, mask, PLANES: tl.constexpr, IS_TRANSPOSED: tl.constexpr):
    """Stores the high plane and, of two, what it leaves over; transposed where IS_TRANSPOSED."""
    tl.store(p_high + o_out, tl.trans(high) if IS_TRANSPOSED else high, mask=mask)
    if PLANES == 2:
        low = rest_of(scaled, high).to(high.dtype)
        tl.store(p_low + o_out, tl.trans(low) if IS_TRANSPOSED else low, mask=mask)


@triton.jit
def multiply(left, left_low, right, right_low, acc, PLANES: tl.constexpr, ACC: tl.constexpr):
    """acc + left · right, of one plane or of two."""
    if PLANES == 2:
        # Tensor cores cut off what does not fit while they accumulate: the sum over one block stays short, small
        # products first, and is added up in ordinary fp32.
        part = tl.dot(left_low, right)
        part = tl.dot(left, right_low, part)
        part = tl.dot(left, right, part)
        acc += part
    else:
        acc = tl.dot(left, right, acc, out_dtype=ACC)
    return acc
