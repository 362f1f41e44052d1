"""The cost of a verdict in float64 operations, and a shape for which it is affordable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from postlude.chain import Chain, Pool

# Forward convolutions in float64 besides those of the points: a null candidate at two points. With NaN or an infinity
# in the input there are more, but only where the result has those at other places than PyTorch's.
EXTRA = 2
GRADIENTS = 2  # of a convolution's input and weight, each as much work as the convolution
LEAST = 8  # positions along an axis, in addition to twice the kernel
SAMPLES = 2


@dataclass(frozen=True)
class Budget:
    """What one verdict may cost: operations in float64, and elements of its largest value."""

    flops: float
    elements: float


def convolution_flops(chain: Chain, shape: Sequence[int]) -> float:
    """Operations of one forward convolution of an input of this shape; 0 if the chain has none."""
    conv = chain.producer
    if conv is None:
        return 0.0
    space = tuple(shape[2:]) if conv.transposed else conv.output_space(tuple(shape[2:]))
    each = conv.in_channels * conv.out_channels // conv.groups * math.prod(conv.kernel)
    return 2.0 * shape[0] * math.prod(space) * each


def verdict_flops(chain: Chain, shape: Sequence[int], points: int, *, backward: bool) -> float:
    """Operations of `verify_chain` with so many points, if the error of the precision itself is not needed."""
    passes = 1 + GRADIENTS if backward else 1
    return convolution_flops(chain, shape) * (points * passes + EXTRA)


def is_affordable(chain: Chain, shape: Sequence[int], points: int, budget: Budget, *, backward: bool) -> bool:
    flops = verdict_flops(chain, shape, points, backward=backward)
    return flops <= budget.flops and largest_value(chain, shape) <= budget.elements


def largest_value(chain: Chain, shape: Sequence[int]) -> int:
    """Elements of the input or of the convolution's result, whichever is larger."""
    conv = chain.producer
    after = math.prod(conv.output_space(tuple(shape[2:]))) * conv.out_channels if conv else 0
    return shape[0] * max(after, math.prod(shape[1:]))


def _covered(chain: Chain) -> list[int]:
    """The least positions of the input for which every following pool has two windows."""
    stride = (1,) * chain.dims if chain.producer is None or chain.producer.transposed else chain.producer.stride
    covered = [0] * chain.dims
    for step in reversed(chain.steps):
        if isinstance(step, Pool):
            windows = step.windows
            covered = [max(n, 2) * s + k for n, s, k in zip(covered, windows.stride, windows.kernel)]
    return [size * s for size, s in zip(covered, stride)]


def affordable_shape(
    chain: Chain, shape: Sequence[int], points: int, budget: Budget, *, backward: bool
) -> tuple[int, ...]:
    """The same shape with fewer samples, then less space, until a verdict on it is affordable."""
    now = list(shape)
    kernel = (1,) * chain.dims if chain.producer is None else chain.producer.kernel
    least = [max(LEAST, 2 * size) + covered for size, covered in zip(kernel, _covered(chain))]
    while not is_affordable(chain, now, points, budget, backward=backward):
        if now[0] > SAMPLES:
            now[0] = max(SAMPLES, now[0] // 2)
            continue
        if not chain.dims:
            break
        longest = max(range(chain.dims), key=lambda axis: now[2 + axis] / least[axis])
        if now[2 + longest] > least[longest]:
            now[2 + longest] = max(least[longest], now[2 + longest] // 2)
        else:
            break
    return tuple(now)
