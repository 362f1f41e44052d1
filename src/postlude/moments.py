"""Moments: the mean and variance per sample and channel, and the part of a chain that needs nothing else.

Variances come from E[x²] − E[x]² only if the mean is small compared with the standard deviation; otherwise the mean is
subtracted first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Cast, Chain, Normalize, Operand, Pointwise, Reduce, Scalar, Slot
from postlude.reference import continue_from

# Largest mean² / variance for which a value is squared without centring: the error of E[x²] − E[x]² grows with 1 + this
# ratio.
_FAR = 4.0


@dataclass(frozen=True)
class Moments:
    mean: Tensor  # [N, C], float64
    variance: Tensor | None  # [N, C], over the positions of one channel; None if it is not needed
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
    """The moments of a value, and what was subtracted from it in place ([N, C] float64, or 0.0)."""
    positions = math.prod(value.shape[2:])
    if squares and not value.is_contiguous() and value.dtype in (torch.float32, torch.float64):
        return _channels_last_moments(value, positions), 0.0
    mean = _sum_over_space(value) / positions
    if not squares:
        return Moments(mean, None, positions), 0.0
    variance = _squares_over_space(value) / positions - mean.square()
    if bool((mean.square() <= _FAR * variance).all()):
        return Moments(mean, variance, positions), 0.0
    wide = value if value.dtype.itemsize >= 4 else value.float()  # 16-bit differences would be too coarse
    centre = mean.to(wide.dtype)
    each = centre.view(-1, value.shape[1], *[1] * (value.dim() - 2))
    centred = wide - each if wide is value and not overwrite else wide.sub_(each)
    rest = _sum_over_space(centred) / positions  # corrects the mean's rounding error
    variance = _squares_over_space(centred) / positions - rest.square()
    # Centring turns an infinity into NaN: there the first mean stays.
    mean = torch.where(mean.isfinite(), centre.double() + rest, mean)
    return Moments(mean, variance, positions), centre.double() if centred is value else 0.0


def _channels_last_moments(value: Tensor, positions: int) -> Moments:
    """Moments by PyTorch's batch statistics, called once per sample on rows of width × channels columns.

    They subtract the mean before squaring, use whole vectors for any number of channels, and sum only a fraction of the
    positions per column. Chan's formula combines the columns.
    """
    batch, channels = value.shape[:2]
    width = value.shape[-1]
    rows = value.movedim(1, -1).reshape(batch, 1, value.shape[2], -1, width * channels)  # [N, 1, S0, S1, W·C]
    found = [torch.batch_norm_update_stats(sample, None, None, 0.0) for sample in rows.movedim(-1, 2)]
    means = torch.stack([mean for mean, _ in found]).view(batch, width, channels).double()
    variances = torch.stack([variance for _, variance in found]).view(batch, width, channels).double()
    mean = means.mean(1)
    return Moments(mean, variances.mean(1) + (means - mean[:, None]).square().mean(1), positions)


def _sum_over_space(value: Tensor) -> Tensor:
    """The sum over space, [N, C] in float64. Short runs are summed in the value's dtype (16-bit in float32)."""
    value = value if value.dtype.itemsize >= 4 else value.float()
    inner = tuple(range(3, value.dim()))
    return value.sum(inner).sum(2, dtype=torch.float64)


def _squares_over_space(value: Tensor) -> Tensor:
    value = value if value.dtype.itemsize >= 4 else value.float()
    norms: Tensor = torch.linalg.vector_norm(value, dim=tuple(range(3, value.dim())))
    return norms.double().square().sum(2)


def finish(
    chain: Chain,
    moments: Moments,
    first: int,
    dtype: torch.dtype,
    tensors: Sequence[Tensor],
    channels_last: bool = False,
    moves: bool = False,
) -> Tensor:
    """Steps `first` to the end, from moments. The steps after the reduction run as they are, on its few numbers.

    `channels_last` says whether the value that PyTorch would have reduced is channels-last, `moves` whether a
    batch_norm updates its running statistics.
    """
    for number in range(first, len(chain.steps) + 1):
        step = chain.steps[number - 1]
        if isinstance(step, Reduce):
            result = _reduce(chain, moments, step).to(dtype)
            return continue_from(chain, number, laid_out(result, step, channels_last), tensors)
        if isinstance(step, Normalize):
            moments = _normalize(moments, step, tensors, moves)
        elif isinstance(step, Pointwise):
            moments = _affine(moments, step, tensors)
        elif not isinstance(step, Cast):
            raise TypeError(f"moments cannot go through {step}")
    raise ValueError("a chain that runs on moments must end its need for them with a reduction")


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


def laid_out(result: Tensor, step: Reduce, channels_last: bool) -> Tensor:
    """The result with PyTorch's strides: its pooling returns channels-last strides even for spatial axes of size 1."""
    if not channels_last or step.op != "adaptive_avg_pool":
        return result
    channels = result.shape[1]
    return result.as_strided(result.shape, (channels, 1, *[channels] * (result.dim() - 2)))


def group_moments(moments: Moments, groups: int) -> tuple[Tensor, Tensor]:
    """Means and variances [N, G, 1] of groups of channels, from those of the channels."""
    assert moments.variance is not None
    means, variances = moments.mean.unflatten(1, (groups, -1)), moments.variance.unflatten(1, (groups, -1))
    mean = means.mean(2, keepdim=True)
    return mean, (variances + (means - mean).square()).mean(2, keepdim=True)


def statistics(moments: Moments, step: Normalize) -> tuple[Tensor, Tensor]:
    """The means and variances that a norm uses for each channel, [N, C]; for batch_norm [1, C]."""
    assert moments.variance is not None
    channels = moments.mean.shape[1]
    if step.over == "batch":
        mean = moments.mean.mean(0, keepdim=True)
        return mean, (moments.variance + (moments.mean - mean).square()).mean(0, keepdim=True)
    groups = step.groups or channels
    middle, spread = (part.expand(-1, -1, channels // groups).flatten(1) for part in group_moments(moments, groups))
    return middle, spread


def move_running(step: Normalize, tensors: Sequence[Tensor], mean: Tensor, variance: Tensor, count: int) -> None:
    """Updates a batch_norm's running statistics with those of `count` values; their variance is the unbiased one."""
    for slot, found in zip(step.running or (), (mean, variance * (count / (count - 1)))):
        old = tensors[slot.index]
        old.copy_((1 - step.momentum) * old.double() + step.momentum * found.detach().reshape(-1))


def _normalize(moments: Moments, step: Normalize, tensors: Sequence[Tensor], moves: bool) -> Moments:
    assert moments.variance is not None
    centre, spread = statistics(moments, step)
    if moves:
        move_running(step, tensors, centre, spread, moments.mean.shape[0] * moments.positions)
    scale = torch.rsqrt(spread + step.eps)
    mean, variance = (moments.mean - centre) * scale, moments.variance * scale.square()
    if step.weight is not None:
        weight = tensors[step.weight.index].double()
        mean, variance = mean * weight, variance * weight.square()
    if step.bias is not None:
        mean = mean + tensors[step.bias.index].double()
    return Moments(mean, variance, moments.positions)


def _affine(moments: Moments, step: Pointwise, tensors: Sequence[Tensor]) -> Moments:
    others = [_per_row(moments, operand, tensors) for operand in step.operands[1:]]
    return AFFINE[step.op](moments, *others, **dict(step.settings))


def _per_row(moments: Moments, operand: Operand, tensors: Sequence[Tensor]) -> Any:
    """A number, or a tensor that broadcasts over samples and channels: [C], [N, C] or [1]."""
    if isinstance(operand, Scalar):
        return operand.value
    assert isinstance(operand, Slot)
    tensor = tensors[operand.index].double()
    return tensor.reshape(moments.mean.shape) if tensor.numel() == moments.mean.numel() else tensor.reshape(-1)


def _shift(moments: Moments, mean: Tensor) -> Moments:
    return Moments(mean, moments.variance, moments.positions)


def _scale(moments: Moments, factor: Tensor | float) -> Moments:
    variance = None if moments.variance is None else moments.variance * (factor * factor)
    return Moments(moments.mean * factor, variance, moments.positions)


def _divide(moments: Moments, divisor: Tensor | float) -> Moments:
    variance = None if moments.variance is None else moments.variance / (divisor * divisor)
    return Moments(moments.mean / divisor, variance, moments.positions)


def _batch_norm(moments: Moments, mean: Tensor, var: Tensor, weight: Any, bias: Any, eps: float) -> Moments:
    scaled = _scale(_shift(moments, moments.mean - mean), weight / torch.sqrt(var + eps))
    return _shift(scaled, scaled.mean + bias)


# One row for each word of the vocabulary that is affine in its first operand (tests/test_tables.py).
AFFINE: dict[str, Callable[..., Moments]] = {
    "add": lambda moments, y: _shift(moments, moments.mean + y),
    "sub": lambda moments, y: _shift(moments, moments.mean - y),
    "rsub": lambda moments, y: _shift(moments, y - moments.mean),
    "mul": _scale,
    "div": _divide,
    "batch_norm": _batch_norm,
}
