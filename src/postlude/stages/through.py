"""A sum computed through its producer (plan/through.py): from sums of the input or of the weight, no convolution.

It has two parts. The producer's part is the sum of what the producer computes without a bias, in float64: [N] for a
linear layer, [N, C] for a convolution. Bias, affine steps and the reduction's form follow, on these few numbers. If
windows are averaged instead, the producer's part is the pooled value, in its own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.chain import Chain, Convolution, Pointwise, Reduce, Scalar, Slot
from postlude.plan.folding import Folding
from postlude.plan.through import Through
from postlude.reference import per_channel
from postlude.stages import tap_sums
from postlude.stages.column_sums import means_of_windows, product_with_sums, sum_of_multiples
from postlude.stages.folding import average_through
from postlude.stages.runs import along, runs_along
from postlude.stages.tap_sums import sums_by_tap, sums_gradient
from postlude.stages.trace import derived

_ADDED = 128  # rows of a weight that PyTorch sums in their own dtype
Coefficient = Tensor | float  # of every channel in float64, or one for all


class Produced(NamedTuple):
    """The producer's part, and what it was computed from: sums of the weight's rows, means of its windows, or the
    input's sums by tap. A convolution with its pool in the weight is computed from the input itself."""

    result: Tensor
    source: Tensor


def produced(chain: Chain, own: Through, tensors: Sequence[Tensor], by_kernels: bool) -> Produced:
    """The producer's part: by our kernels, or by PyTorch's operators on a CPU and for layouts that no kernel reads."""
    conv, (x, weight) = chain.convolution, tensors[:2]
    by_kernels = by_kernels and x.is_contiguous() and weight.is_contiguous()
    if own.folding is not None:
        if not conv.is_linear:
            return Produced(average_through(conv, own.folding, x, weight), x)
        means = _means_of(weight, own.folding, by_kernels)
        return Produced(F.linear(x, means), means)
    if conv.is_linear:
        return Produced(*product_with_sums(x, weight)) if by_kernels else _product_by_pytorch(x, weight)
    sums = sums_by_tap(conv, x) if by_kernels and tap_sums.serves(conv, x) else _sums_by_pytorch(conv, x)
    return Produced(_weighted(sums, conv, weight, x), sums)


def finished(chain: Chain, own: Through, value: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The result of the step that sums or averages, from the producer's part."""
    conv, step, dtype = chain.convolution, chain.steps[own.reduction - 1], tensors[0].dtype
    slope, shift = _affine(chain, own.reduction, tensors)
    if own.folding is not None and conv.is_linear:
        return value + _means_of(tensors[2], own.folding) if conv.has_bias else value
    constant = _applied(tensors[2].double(), slope, shift) if conv.has_bias else shift
    if own.folding is not None:  # windows are as large as a value
        parts = (per_channel(part.to(dtype), conv.dims) if isinstance(part, Tensor) else part
                 for part in (slope, constant))  # fmt: skip
        return _applied(value, *parts).contiguous()
    assert isinstance(step, Reduce)
    is_sum = step.op == "sum"
    if conv.is_linear:
        features = conv.out_channels
        added = constant.expand(features).sum() if isinstance(constant, Tensor) else constant * features
        total = _applied(value, slope, added)  # [N]
        result = (total if is_sum else total / features).to(dtype)
        return result.unsqueeze(1) if step.keepdim else result
    positions, means = _positions(conv, tensors[0]), _applied(value, slope, constant)  # [N, C]
    if step.over == "sample":
        result = (means.sum(1) * positions if is_sum else means.mean(1)).to(dtype)
        return result.reshape(-1, *[1] * (conv.dims + 1)) if step.keepdim else result
    result = (means * positions if is_sum else means).to(dtype)
    keeps = step.keepdim or step.op == "adaptive_avg_pool"
    return result.reshape(*result.shape, *[1] * conv.dims) if keeps else result


def gradients_through(
    chain: Chain, own: Through, tensors: Sequence[Tensor], part: Produced, dy: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradient of every slot that needs one, on a GPU."""
    slots = [slot for slot, is_needed in enumerate(needs) if is_needed and slot > 1]

    def rest(value: Tensor, *wanted: Tensor) -> Tensor:
        given = dict(zip(slots, wanted))
        return finished(chain, own, value, [given.get(slot, tensor) for slot, tensor in enumerate(tensors)])

    grads: list[Tensor | None] = [None] * len(tensors)
    if not any(needs):
        return grads
    dvalue, *found = derived(rest, [part.result, *(tensors[slot] for slot in slots)], dy)
    for slot, gradient in zip(slots, found):
        grads[slot] = gradient.contiguous()
    if needs[0] or needs[1]:
        both = _producers_gradients(chain.convolution, own, tensors[0], tensors[1], part, dvalue)
        grads[:2] = [gradient.contiguous() if is_needed else None for gradient, is_needed in zip(both, needs)]
    return grads


def _producers_gradients(
    conv: Convolution, own: Through, x: Tensor, weight: Tensor, part: Produced, dvalue: Tensor
) -> list[Tensor]:
    """Of the input and of the weight, from the gradient of the producer's part."""
    if (folding := own.folding) is not None:
        if not conv.is_linear:
            return derived(lambda x, weight: average_through(conv, folding, x, weight), [x, weight], dvalue)
        dx, dmeans = derived(F.linear, [x, part.source], dvalue)
        return [dx, *derived(lambda weight: _means_of(weight, folding), [weight], dmeans)]
    if conv.is_linear:
        dsums = sum_of_multiples(x, dvalue) if x.is_contiguous() else torch.mv(x.double().t(), dvalue)
        dx = torch.outer(dvalue.to(x.dtype), part.source.to(x.dtype))
        return [dx, dsums.to(weight.dtype).expand(weight.shape)]
    dsums, dweight = derived(lambda sums, weight: _weighted(sums, conv, weight, x), [part.source, weight], dvalue)
    if tap_sums.serves(conv, x):
        return [sums_gradient(conv, dsums, x), dweight]
    return [*derived(lambda x: _sums_by_pytorch(conv, x), [x], dsums), dweight]


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


def _applied(value: Tensor, slope: Coefficient, shift: Coefficient) -> Tensor:
    """slope · value + shift, without operations that change nothing."""
    if isinstance(slope, Tensor) or slope != 1.0:
        value = value * slope
    return value + shift if isinstance(shift, Tensor) or shift != 0.0 else value


def _means_of(rows: Tensor, folding: Folding, by_kernels: bool = False) -> Tensor:
    """The means of the rows, or numbers, of each window of features."""
    (window,), count = folding.window, folding.convolution.out_channels
    if by_kernels:
        return means_of_windows(rows, window, count)
    pooled = rows if rows.shape[0] == count * window else rows.narrow(0, 0, count * window)
    return pooled.reshape(count, window, *rows.shape[1:]).mean(1)


def _product_by_pytorch(x: Tensor, weight: Tensor) -> Produced:
    """x · (the sum of the weight's rows), as column_sums.product_with_sums.

    The weight is large: it is summed in its own dtype up to the last sums, which are few and in float64, because the
    result would otherwise consist of their rounding error.
    """
    each = math.gcd(weight.shape[0], _ADDED)
    sums = weight.reshape(weight.shape[0] // each, each, -1).sum(1).double().sum(0)
    return Produced(_as_infinite(torch.mv(x.double(), sums), x, weight), sums)


def _as_infinite(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Puts NaN where PyTorch would have added infinities of both signs.

    The largest and the smallest weight of an input feature tell which signs there are.
    """
    least, most = weight.amin(0), weight.amax(0)  # aminmax takes seven times as long on a CPU
    return torch.where(total.abs() < torch.inf, total, (torch.mv(x, least) + torch.mv(x, most)).double())


def _sums_by_pytorch(conv: Convolution, x: Tensor) -> Tensor:
    """What tap_sums.sums_by_tap computes, [N, C, taps]; the longest axis is read only once."""
    value = x
    out = conv.output_space(tuple(x.shape[2:]))
    for axis in reversed(range(conv.dims)):
        value = torch.stack(along(value, 2 + axis, runs_along(conv, axis, x.shape[2 + axis], out[axis])), -1)
        value = value.double()
    return value.permute(0, 1, *reversed(range(2, 2 + conv.dims))).flatten(2)


def _weighted(sums: Tensor, conv: Convolution, weight: Tensor, x: Tensor) -> Tensor:
    """The means [N, C] over positions, in float64: sums by tap times the weight."""
    by_output = weight.transpose(0, 1) if conv.transposed else weight
    return sums.flatten(1).matmul(by_output.double().flatten(1).t()) / _positions(conv, x)


def _positions(conv: Convolution, x: Tensor) -> int:
    return math.prod(conv.output_space(tuple(x.shape[2:])))
