"""A sum computed through its producer (plan/through.py): PyTorch's operators on small tensors, no convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Chain, Convolution, Pointwise, Reduce, Scalar, Slot
from postlude.stages.trace import derived

_ADDED = 128  # rows of a weight that are summed in its own dtype
Coefficient = Tensor | float  # of every channel in float64, or one for all


def sum_through(chain: Chain, number: int, tensors: Sequence[Tensor]) -> Tensor:
    """The result of step `number` of the chain, which sums over all positions or all features."""
    conv, step = chain.convolution, chain.steps[number - 1]
    assert isinstance(step, Reduce)
    slope, shift = _affine(chain, number, tensors)
    x, weight = tensors[:2]
    bias = tensors[2].double() if conv.has_bias else 0.0
    if conv.is_linear:
        total, count = _of_features(x, weight, bias, slope, shift), conv.out_channels
        result = (total if step.op == "sum" else total / count).to(x.dtype)
        return result.unsqueeze(1) if step.keepdim else result
    positions = math.prod(conv.output_space(tuple(x.shape[2:])))
    means = _weighted(_sums_by_tap(conv, x), conv, weight) / positions + bias  # [N, C]
    means = means * slope + shift
    if step.over == "sample":
        return _over_channels(step, means, positions, conv.dims).to(x.dtype)
    result = (means * positions if step.op == "sum" else means).to(x.dtype)
    keeps = step.keepdim or step.op == "adaptive_avg_pool"
    return result.reshape(*result.shape, *[1] * conv.dims) if keeps else result


def gradients_through(
    chain: Chain, number: int, tensors: Sequence[Tensor], dy: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    slots = [slot for slot, is_needed in enumerate(needs) if is_needed]

    def result(*wanted: Tensor) -> Tensor:
        given = dict(zip(slots, wanted))
        return sum_through(chain, number, [given.get(slot, tensor) for slot, tensor in enumerate(tensors)])

    found = dict(zip(slots, derived(result, [tensors[slot] for slot in slots], dy)))
    return [found[slot].contiguous() if slot in found else None for slot in range(len(tensors))]


def _affine(chain: Chain, number: int, tensors: Sequence[Tensor]) -> tuple[Coefficient, Coefficient]:
    """The steps before `number` as an affine function of the value v: slope · v + shift."""
    slope: Coefficient = 1.0
    shift: Coefficient = 0.0
    for step in chain.steps[: number - 1]:
        assert isinstance(step, Pointwise)
        by = _number(step.operands[1], tensors)
        if step.op in ("mul", "div"):
            slope, shift = (slope * by, shift * by) if step.op == "mul" else (slope / by, shift / by)
        elif step.op == "rsub":
            slope, shift = -slope, by - shift
        else:
            shift = shift + by if step.op == "add" else shift - by
    return slope, shift


def _number(operand: object, tensors: Sequence[Tensor]) -> Coefficient:
    if isinstance(operand, Scalar):
        return operand.value
    assert isinstance(operand, Slot)
    return tensors[operand.index].double().reshape(-1)


def _of_features(x: Tensor, weight: Tensor, bias: Coefficient, slope: Coefficient, shift: Coefficient) -> Tensor:
    """The sum [N] in float64 over all features of a linear layer.

    The weight is large: it is summed in its own dtype up to the last sums, which are few and in float64, because the
    result would otherwise consist of their rounding error.
    """
    features = weight.shape[0]
    each = math.gcd(features, _ADDED)
    rows = weight.reshape(features // each, each, -1).sum(1).double().sum(0)
    total = _as_infinite(torch.mv(x.double(), rows), x.detach(), weight.detach())
    constant = bias * slope + shift
    added = constant.expand(features).sum() if isinstance(constant, Tensor) else constant * features
    return total * slope + added


def _as_infinite(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Puts NaN where PyTorch would have added infinities of both signs.

    The largest and the smallest weight of an input feature tell which signs there are.
    """
    least, most = torch.aminmax(weight, dim=0)
    return torch.where(total.abs() < torch.inf, total, (torch.mv(x, least) + torch.mv(x, most)).double())


def _sums_by_tap(conv: Convolution, x: Tensor) -> Tensor:
    """The sums [N, C, *taps]: for each tap, over the input positions that it reads. The longest axis is read only
    once."""
    value = x
    out = conv.output_space(tuple(x.shape[2:]))
    for axis in reversed(range(conv.dims)):
        value = torch.stack(_along(value, 2 + axis, _runs(conv, axis, x.shape[2 + axis], out[axis])), -1)
        value = value.double()
    return value.permute(0, 1, *reversed(range(2, 2 + conv.dims)))


def _runs(conv: Convolution, axis: int, size: int, out: int) -> list[tuple[int, int]]:
    """For each tap, the range [first, end) of positions along an axis that it reads."""
    found = []
    for tap in range(conv.kernel[axis]):
        ahead = tap * conv.dilation[axis] - conv.padding[axis]
        if conv.transposed:  # position i contributes to output i · stride + ahead
            step = conv.stride[axis]
            first, last = -(ahead // step), (out - 1 - ahead) // step
        else:  # output o reads position o + ahead
            first, last = ahead, out - 1 + ahead
        found.append((max(0, first), max(max(0, first), min(size, last + 1))))
    return found


def _along(value: Tensor, axis: int, runs: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The sums of all runs. What they share is summed once, and nothing is subtracted, which would lose digits."""
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


def _weighted(sums: Tensor, conv: Convolution, weight: Tensor) -> Tensor:
    """The sums times the weight, [N, C] in float64."""
    by_output = weight.transpose(0, 1) if conv.transposed else weight
    return sums.flatten(1).matmul(by_output.double().flatten(1).t())


def _over_channels(step: Reduce, means: Tensor, positions: int, dims: int) -> Tensor:
    result = means.sum(1) * positions if step.op == "sum" else means.mean(1)
    return result.reshape(-1, *[1] * (dims + 1)) if step.keepdim else result
