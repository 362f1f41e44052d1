"""Moments: the mean and variance per sample and channel, and the part of a chain that needs nothing else.

Variances never come from E[x²] − E[x]²: values are centred first, in place or through the convolution's bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from postlude.chain import Cast, Chain, Normalize, Pointwise, Reduce, Scalar, Slot
from postlude.reference import apply
from postlude.run.conv_mean import convolution_mean

Convolve = Callable[[Tensor, "Tensor | None"], Tensor]

# A slab is centred by its own mean; a sample that lies further from it than this many variances is done alone.
# The error of a variance grows with 1 + this ratio, so 4 keeps it at a few units in the last place.
_FAR = 4.0


@dataclass(frozen=True)
class Moments:
    mean: Tensor  # [N, C], float64
    variance: Tensor | None  # [N, C], over the positions of one channel; None where nothing needs it
    positions: int

    @staticmethod
    def cat(parts: Sequence[Moments]) -> Moments:
        variances = [part.variance for part in parts if part.variance is not None]
        return Moments(
            torch.cat([part.mean for part in parts]),
            torch.cat(variances) if variances else None,
            parts[0].positions,
        )


def channel_moments(value: Tensor, squares: bool, overwrite: bool) -> tuple[Moments, Tensor | float]:
    """Moments of a value, and what was subtracted from it in place ([N, C] float64, or 0.0 where nothing was).

    Sums of squares are taken as the value is where every mean is small beside its spread; else it is centred first.
    """
    positions = math.prod(value.shape[2:])
    mean = sum_over_space(value) / positions
    if not squares:
        return Moments(mean, None, positions), 0.0
    if value.is_contiguous():
        variance = squares_over_space(value) / positions - mean.square()
        if bool((mean.square() <= _FAR * variance).all()):
            return Moments(mean, variance, positions), 0.0
    centre = mean.to(value.dtype)
    spread = (-1, value.shape[1], *[1] * (value.dim() - 2))
    centred = value.sub_(centre.view(spread)) if overwrite else value - centre.view(spread)
    total = squares_over_space(centred) if value.is_contiguous() else sum_over_space(centred * centred)
    variance = total / positions - (mean - centre.double()).square()
    return Moments(mean, variance, positions), centre.double() if overwrite else 0.0


def squares_over_space(value: Tensor) -> Tensor:
    """[N, C] in float64: sums of squares of a contiguous value, short runs in its dtype, the rest in float64."""
    rows = value.view(*value.shape[:3], -1)  # [N, C, S0, S1·S2]
    norms: Tensor = torch.linalg.vector_norm(rows, dim=3)
    return norms.double().square().sum(2)


def centred_moments(chain: Chain, convolve: Convolve, tensors: Sequence[Tensor], slab: int) -> Moments:
    """Moments of a convolution's result, with the mean taken from the input and subtracted through the bias.

    The convolution then gives centred values at once: one pass over the slab, the sum of squares, is left.
    """
    conv, x = chain.producer, tensors[0]
    assert conv is not None
    mean = convolution_mean(conv, x, tensors[1])  # [N, C]
    positions = math.prod(conv.output_space(tuple(x.shape[2:])))
    variances = []
    for start in range(0, x.shape[0], slab):
        part, own = x[start : start + slab], mean[start : start + slab]
        variance = _variance_around(convolve, part, own, positions)
        if slab > 1 and not bool(((own - own.mean(0)).square() <= _FAR * variance).all()):
            alone = [_variance_around(convolve, part[i : i + 1], own[i : i + 1], positions) for i in range(len(part))]
            variance = torch.cat(alone)
        variances.append(variance)
    if conv.has_bias:
        mean = mean + tensors[2].double()
    return Moments(mean, torch.cat(variances), positions)


def _variance_around(convolve: Convolve, x: Tensor, mean: Tensor, positions: int) -> Tensor:
    shift = mean.mean(0).to(x.dtype)  # [C]
    squares = sum_over_space(convolve(x, -shift).square_()) / positions
    return squares - (mean - shift.double()).square()


def sum_over_space(value: Tensor) -> Tensor:
    """[N, C] in float64. Short runs are added in the value's dtype, the rest in float64."""
    batch, channels = value.shape[:2]
    if value.is_contiguous():
        return value.flatten(2).view(batch, channels, value.shape[2], -1).sum(3).sum(2, dtype=torch.float64)
    inner = value.movedim(1, -1).reshape(batch, value.shape[2], -1, channels)  # [N, S0, S1·S2, C]
    # Several positions side by side make rows wide enough for vector units and the runs shorter.
    width = next(size for size in (16, 12, 9, 8, 7, 6, 5, 4, 3, 2, 1) if inner.shape[2] % size == 0)
    rows = inner.view(batch, value.shape[2], -1, width * channels).sum(2)  # [N, S0, width·C]
    return rows.view(batch, -1, channels).sum(1, dtype=torch.float64)


def finish(chain: Chain, moments: Moments, first: int, dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensor:
    """Steps `first` to the end, from moments; what follows the reduction runs as written, on its few numbers."""
    for number in range(first, len(chain.steps) + 1):
        step = chain.steps[number - 1]
        if isinstance(step, Reduce):
            return _tail(chain, _reduce(chain, moments, step).to(dtype), number, tensors)
        if isinstance(step, Normalize):
            moments = _normalize(moments, step, tensors)
        elif isinstance(step, Pointwise):
            moments = _affine(moments, step, tensors)
        elif not isinstance(step, Cast):
            raise TypeError(f"moments cannot go through {step}")
    raise ValueError("a chain that runs on moments must end its need for them with a reduction")


def _tail(chain: Chain, reduced: Tensor, number: int, tensors: Sequence[Tensor]) -> Tensor:
    values: list[Tensor | None] = [None] * number + [reduced]
    for step in chain.steps[number:]:
        values.append(apply(chain, step, values, tensors))
    result = values[-1]
    assert result is not None
    return result


def _reduce(chain: Chain, moments: Moments, step: Reduce) -> Tensor:
    result, count = moments.mean, moments.positions
    if step.over == "sample":
        count *= result.shape[1]
        result = result.mean(1)
    if step.op == "sum":
        result = result * count
    if step.keepdim:
        result = result.reshape(*result.shape, *[1] * (chain.dims + 2 - result.dim()))
    return result


def _normalize(moments: Moments, step: Normalize, tensors: Sequence[Tensor]) -> Moments:
    mean, variance = moments.mean, moments.variance
    assert variance is not None
    groups = step.groups or mean.shape[1]
    grouped, within = mean.unflatten(1, (groups, -1)), variance.unflatten(1, (groups, -1))  # [N, G, C/G]
    centred = grouped - grouped.mean(2, keepdim=True)
    scale = torch.rsqrt((within + centred.square()).mean(2, keepdim=True) + step.eps)
    mean, variance = (centred * scale).flatten(1), (within * scale.square()).flatten(1)
    if step.weight is not None:
        weight = tensors[step.weight.index].double()
        mean, variance = mean * weight, variance * weight.square()
    if step.bias is not None:
        mean = mean + tensors[step.bias.index].double()
    return Moments(mean, variance, moments.positions)


def _affine(moments: Moments, step: Pointwise, tensors: Sequence[Tensor]) -> Moments:
    operand = step.operands[1]
    if isinstance(operand, Scalar):
        return AFFINE[step.op](moments, operand.value)
    assert isinstance(operand, Slot)
    return AFFINE[step.op](moments, tensors[operand.index].reshape(-1).double())  # [C]


def _add(moments: Moments, other: Tensor | float) -> Moments:
    return Moments(moments.mean + other, moments.variance, moments.positions)


def _mul(moments: Moments, other: Tensor | float) -> Moments:
    variance = None if moments.variance is None else moments.variance * (other * other)
    return Moments(moments.mean * other, variance, moments.positions)


# One row for each word of the vocabulary that is affine in its first operand (tests/test_tables.py).
AFFINE: dict[str, Callable[[Moments, Tensor | float], Moments]] = {"add": _add, "mul": _mul}
