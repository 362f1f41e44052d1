"""A sum computed through its producer (plan/through.py): PyTorch's operators on small tensors, no convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Chain, Convolution, Pointwise, Pool, Reduce, Scalar, Slot
from postlude.plan.folding import folding_of
from postlude.reference import per_channel
from postlude.stages.folding import average_through, features_through
from postlude.stages.runs import along, runs_along
from postlude.stages.trace import derived

_ADDED = 128  # rows of a weight that are summed in its own dtype
Coefficient = Tensor | float  # of every channel in float64, or one for all


def sum_through(chain: Chain, number: int, tensors: Sequence[Tensor]) -> Tensor:
    """The result of step `number` of the chain, which sums all positions or all features, or averages windows."""
    conv, step = chain.convolution, chain.steps[number - 1]
    slope, shift = _affine(chain, number, tensors)
    x, weight = tensors[:2]
    bias = tensors[2].double() if conv.has_bias else 0.0
    if isinstance(step, Pool) and conv.is_linear:
        folding = folding_of(conv, step, ())
        assert folding is not None
        return features_through(folding, x, weight, tensors[2] if conv.has_bias else None)
    if isinstance(step, Pool):
        return _averages(conv, step, x, weight, slope, bias * slope + shift)
    assert isinstance(step, Reduce)
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


def _averages(
    conv: Convolution, step: Pool, x: Tensor, weight: Tensor, slope: Coefficient, shift: Coefficient
) -> Tensor:
    """Of windows, which are as large as a value: in the value's own dtype."""
    folding = folding_of(conv, step, tuple(x.shape[2:]))
    assert folding is not None
    found = average_through(conv, folding, x, weight)
    for by, word in ((slope, torch.mul), (shift, torch.add)):
        if isinstance(by, Tensor):
            found = word(found, per_channel(by.to(x.dtype), conv.dims))
        elif by != (1.0 if word is torch.mul else 0.0):
            found = word(found, by)
    return found.contiguous()


def gradients_through(
    chain: Chain, number: int, tensors: Sequence[Tensor], dy: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    slots = [slot for slot, is_needed in enumerate(needs) if is_needed]
    if not slots:
        return [None] * len(tensors)

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
        value = torch.stack(along(value, 2 + axis, runs_along(conv, axis, x.shape[2 + axis], out[axis])), -1)
        value = value.double()
    return value.permute(0, 1, *reversed(range(2, 2 + conv.dims)))


def _weighted(sums: Tensor, conv: Convolution, weight: Tensor) -> Tensor:
    """The sums times the weight, [N, C] in float64."""
    by_output = weight.transpose(0, 1) if conv.transposed else weight
    return sums.flatten(1).matmul(by_output.double().flatten(1).t())


def _over_channels(step: Reduce, means: Tensor, positions: int, dims: int) -> Tensor:
    result = means.sum(1) * positions if step.op == "sum" else means.mean(1)
    return result.reshape(-1, *[1] * (dims + 1)) if step.keepdim else result
