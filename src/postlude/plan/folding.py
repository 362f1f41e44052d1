"""An average pool that is folded into its convolution: one convolution whose weight has the pool in it.

Both are linear, so the average of a window of results is a sum of inputs, each times an average of taps. Along an axis
with windows of p positions, a step q between them, and a convolution of k taps, stride s and padding d:

    plain        y[u] = 1/p Σ_j Σ_t w[t] x[(u·q + j)·s + t − d]      a convolution of k + (p − 1)·s taps, stride q·s
    transposed   position i reaches i·s + t − d                      one of stride q/s, of the taps whose j − t + d is a
                                                                     multiple of s

A window as long as the axis leaves one position: there each tap meets a sum of the input's positions, which are added
up first, and the axis is gone (`summed`). The mean over the depth of conv_transpose3d(16→64, k3) at 32×128² takes 14
instead of 464 GFLOP.

Of a linear layer's features the averages are those of its weight's rows.

NaN stay. An infinity in the input meets an average of taps: it stays one where PyTorch's average of infinities of both
signs is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from postlude.chain import Convolution, Pool, linear


@dataclass(frozen=True)
class Folding:
    """What is left to compute: a convolution, along the axes that are not summed."""

    convolution: Convolution
    summed: int | None  # the axis whose positions are added up first
    window: tuple[int, ...]  # of the pool, along the other axes
    first: tuple[int, ...]  # of a transposed convolution's taps spread over windows, the first that is met
    step: tuple[int, ...]  # and how far the next one is: its strides
    space: tuple[int, ...]  # of the pooled value, along the other axes


def folding_of(conv: Convolution, pool: Pool, space: tuple[int, ...]) -> Folding | None:
    """The folding of a pool into the convolution before it, whose input has this space; None where there is none."""
    if conv.is_linear:
        return _of_features(conv, pool)
    windows, out = pool.windows, conv.output_space(space)
    is_plain = pool.op == "avg_pool" and pool.divisor is None and conv.groups == 1 and conv.dtype is None
    if not is_plain or windows.has_border(out) or any(size != 1 for size in conv.dilation):
        return None
    whole = [axis for axis, size in enumerate(out) if windows.kernel[axis] == size > 1]
    rest = [size for axis, size in enumerate(windows.kernel) if axis not in whole[:1]]
    if whole and conv.dims > 1 and set(rest) == {1}:
        axis = whole[0]
        is_met = conv.transposed or conv.stride[axis] == 1
        return _summed(conv, axis, out) if is_met and set(windows.stride) - {windows.stride[axis]} <= {1} else None
    return _folded(conv, pool, space)


def _of_features(conv: Convolution, pool: Pool) -> Folding | None:
    windows = pool.windows
    is_plain = pool.op == "avg_pool" and pool.divisor is None and conv.dtype is None
    if not is_plain or windows.kernel != windows.stride or any(windows.padding) or windows.is_ceil:
        return None
    (outputs,) = windows.output_space((conv.out_channels,))
    return Folding(linear(conv.in_channels, outputs), None, windows.kernel, (), (), ())


def _summed(conv: Convolution, axis: int, out: tuple[int, ...]) -> Folding:
    def others(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes[:axis] + sizes[axis + 1 :]

    flat = Convolution(
        conv.transposed,
        conv.in_channels * conv.kernel[axis],
        conv.out_channels,
        others(conv.kernel),
        others(conv.stride),
        others(conv.padding),
        others(conv.dilation),
        others(conv.output_padding),
    )
    ones, zeros = (1,) * flat.dims, (0,) * flat.dims
    return Folding(flat, axis, ones, zeros, ones, others(out))


def _folded(conv: Convolution, pool: Pool, space: tuple[int, ...]) -> Folding | None:
    windows, out = pool.windows, pool.windows.output_space(conv.output_space(space))
    kernel, stride, padding, first = [], [], [], []
    for axis, size in enumerate(space):
        k, s, d, p, q = (
            *(conv.kernel[axis], conv.stride[axis], conv.padding[axis]),
            *(windows.kernel[axis], windows.stride[axis]),
        )
        if conv.transposed:
            if q % s:
                return None
            start = (k - 1 - d) % s
            taps, each, before = (k + p - 2 - start) // s + 1, q // s, (k - 1 - d - start) // s
        else:
            start, taps, each, before = 0, k + (p - 1) * s, q * s, d
        # One padding serves both ends: what lies behind the last window may be less than that.
        if before < 0 or (out[axis] - 1) * each + taps - before - size > before:
            return None
        kernel.append(taps)
        stride.append(each)
        padding.append(before)
        first.append(start)
    sizes = (tuple(kernel), tuple(stride), tuple(padding), (1,) * conv.dims, (0,) * conv.dims)
    folded = Convolution(False, conv.in_channels, conv.out_channels, *sizes)
    step = conv.stride if conv.transposed else (1,) * conv.dims
    return Folding(folded, None, windows.kernel, tuple(first), step, out)


def folded_flops(folding: Folding, batch: int) -> int:
    """Operations of the convolution that is left, without positions behind the last window."""
    conv = folding.convolution
    return 2 * batch * math.prod(folding.space) * math.prod(conv.kernel) * conv.in_channels * conv.out_channels
