"""What each tap of a convolution meets along an axis of its input, added up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from postlude.chain import Convolution


def runs_along(conv: Convolution, axis: int, size: int, out: int) -> list[tuple[int, int]]:
    """First and last + 1 of the positions along an axis that each tap meets."""
    found = []
    for tap in range(conv.kernel[axis]):
        ahead = tap * conv.dilation[axis] - conv.padding[axis]
        if conv.transposed:  # position i reaches i · stride + ahead
            step = conv.stride[axis]
            first, last = -(ahead // step), (out - 1 - ahead) // step
        else:  # result o reads o + ahead
            first, last = ahead, out - 1 + ahead
        found.append((max(0, first), max(max(0, first), min(size, last + 1))))
    return found


def along(value: Tensor, axis: int, runs: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The sums of all runs: what they share is added up once, and nothing is subtracted again."""
    first, last = max(run[0] for run in runs), min(run[1] for run in runs)
    if first >= last:
        return [value.narrow(axis, low, high - low).sum(axis) for low, high in runs]
    shared, found = value.narrow(axis, first, last - first).sum(axis), []
    for low, high in runs:
        total = shared
        if low < first:
            total = total + value.narrow(axis, low, first - low).sum(axis)
        if high > last:
            total = total + value.narrow(axis, last, high - last).sum(axis)
        found.append(total)
    return found
