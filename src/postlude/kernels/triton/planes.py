"""Half-precision planes: a number split into fp16 parts, whose products tensor cores compute exactly.

A number is scaled by a power of two and split into high = fp16(number) and, with two planes, low = fp16(number − high).
The power brings the largest magnitude to 2¹⁴…2¹⁵, per channel of the input and per output channel of the weight. The
weight is divided by the input's powers, so only its own have to be undone after the GEMM, with p_unscale.

KEEPS_INF is set where no norm follows: an infinity must then give what PyTorch's convolution gives. With one plane it
does, provided that no nonzero number beside it rounds to zero (`not_zero`). With two planes the product of the high
planes alone gives it. That product is computed only if the flag after the last channel in `p_largest` says that an
operand holds an infinity.
"""

import triton
import triton.language as tl


@triton.jit
def finite_magnitude(x):
    """|x|, or 0 where x is not finite: an infinity must not set the scale of a whole channel."""
    magnitude = tl.abs(x.to(tl.float32))
    return tl.where(magnitude < float("inf"), magnitude, 0.0)  # also 0 for NaN


@triton.jit
def scale_for(largest):
    """The power of two that scales `largest` to 2¹⁴…2¹⁵; 1 for 0. Clamped where the power itself would overflow."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.where(largest == 0.0, 14, tl.maximum(exponent, -100))
    return ((127 + 14 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rest_of(x, high):
    """x minus its high plane; 0 for an infinity, which would give NaN."""
    rest = x - high.to(tl.float32)
    return tl.where(tl.abs(rest) < float("inf"), rest, 0.0)


@triton.jit
def not_zero(x, scaled):
    """`scaled`, but where fp16 would round a nonzero x to zero, the smallest number of x's sign.

    An infinity times zero would be NaN. This is done before the conversion, which then converts two numbers at a time.
    """
    tiny = tl.where(x < 0.0, -5.9604644775390625e-08, 5.9604644775390625e-08)  # 2⁻²⁴
    return tl.where((tl.abs(scaled) < 5.9604644775390625e-08) & (x != 0.0), tiny, scaled)


@triton.jit
def flag_infinity(p_flag, x):
    """Writes a 1 if x holds an infinity. Usually nothing is written."""
    if tl.max(tl.abs(x.to(tl.float32))) == float("inf"):
        tl.atomic_max(p_flag, 1, sem="relaxed")


@triton.jit
def scale_of(p_largest, o_c, m_c):
    """The scale of each channel, from the bits of its largest magnitude."""
    return scale_for(tl.load(p_largest + o_c, mask=m_c, other=0).to(tl.float32, bitcast=True))


@triton.jit
def high_plane(given, scaled, KEEPS_INF: tl.constexpr, dtype: tl.constexpr):
    """The high plane of a scaled block; `given` is the block before scaling."""
    return (not_zero(given, scaled) if KEEPS_INF else scaled).to(dtype)


@triton.jit
def store_planes(p_high, p_low, o_out, high, scaled, mask, PLANES: tl.constexpr, IS_TRANSPOSED: tl.constexpr):
    """Stores the high plane and, with two planes, the low one; transposed where IS_TRANSPOSED."""
    tl.store(p_high + o_out, tl.trans(high) if IS_TRANSPOSED else high, mask=mask)
    if PLANES == 2:
        low = rest_of(scaled, high).to(high.dtype)
        tl.store(p_low + o_out, tl.trans(low) if IS_TRANSPOSED else low, mask=mask)


@triton.jit
def multiply(left, left_low, right, right_low, acc, PLANES: tl.constexpr, ACC: tl.constexpr):
    """acc + left · right, with operands of one plane or two."""
    if PLANES == 2:
        # Tensor cores truncate while they accumulate: they sum over one block only, small products first, and
        # its sum is added in ordinary fp32 (promotion).
        part = tl.dot(left_low, right)
        part = tl.dot(left, right_low, part)
        part = tl.dot(left, right, part)
        acc += part
    else:
        acc = tl.dot(left, right, acc, out_dtype=ACC)
    return acc
