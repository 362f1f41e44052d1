"""Operators that keep layouts in a graph. They consist of PyTorch's own operators, so that a compiler fuses them.

`norm` is group_norm or instance_norm in the layout of its input. PyTorch's group_norm on a GPU is contiguous, forward
and backward. Between channels-last convolutions that means one conversion of the value before it, and one of the
gradient in each `convolution_backward` (1.2 ms of the 15.7 ms GPU time of a resnet50_gn training step on an H200). This
operator is a reduction over space and one pass, in both directions.

`weights` is the cast that autocast makes of convolutions' weights, for all weights of a graph at once. As one list they
are one launch of Inductor's instead of one each, and so are the casts of their gradients: a fifth of the launches of a
training step of resnet50_gn. cuDNN returns a gradient channels-last, and autograd would copy it into the weight's own
layout. Here the cast back does that on its way.

`channels_last` is a value in that layout, which Inductor does not change.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from postlude.plan.problem import layout_of, memory_format
from postlude.run.operator import LIBRARY

_RESULTS = 16384  # of a reduction that Inductor does not split: from 64 for each of an H200's 132 multiprocessors on
_LEAST_POSITIONS = 32  # of a part

LIBRARY.define("channels_last(Tensor x) -> Tensor")
LIBRARY.define("weights(Tensor[] weights, ScalarType dtype) -> Tensor[]")
LIBRARY.define(
    "norm(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, ScalarType computed, ScalarType dtype)"
    " -> Tensor"
)


class _ChannelsLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        from torch._inductor import inductor_prims

        laid_out = x.contiguous(memory_format=memory_format("channels_last", x.dim() - 2))
        found: Tensor = inductor_prims.force_stride_order(laid_out, laid_out.stride())
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # noqa: ARG004
        return dy


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.specs = [(weight.dtype, memory_format(layout_of(weight), weight.dim() - 2)) for weight in weights]
        return tuple(_at_once([weight.to(dtype) for weight in weights]))

    @staticmethod
    def backward(ctx: Any, *found: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = [(dy, *spec) for dy, spec in zip(found, ctx.specs) if dy is not None]
        cast = iter(_at_once([dy.to(dtype).contiguous(memory_format=layout) for dy, dtype, layout in pairs]))
        return None, *(None if dy is None else next(cast) for dy in found)


def _at_once(tensors: list[Tensor]) -> list[Tensor]:
    """The same values. Inductor computes what an operator on lists reads and writes in one kernel."""
    return list(torch._foreach_mul(tensors, 1.0)) if len(tensors) > 1 else tensors


def _weights(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return list(_Weights.apply(dtype, *weights))  # type: ignore[no-untyped-call]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        computed: torch.dtype,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.groups, ctx.computed, ctx.of_bias = groups, computed, None if bias is None else bias.dtype
        variance, mean = torch.var_mean(_parts(x.to(computed)), 2, correction=0)  # [N, K, C] each, in one reading
        of_groups = _grouped(mean, groups).mean((1, 3), keepdim=True)  # [N, 1, G, 1]
        apart = (_grouped(mean, groups) - of_groups).square()
        spread = torch.rsqrt((_grouped(variance, groups) + apart).mean((1, 3)) + eps)  # [N, G]
        of_groups = of_groups.flatten(1)
        ctx.save_for_backward(x, weight, of_groups, spread)
        scaled = _scale(spread, weight, x)
        result = (x.to(computed) - _of_channels(of_groups, x)) * scaled
        return (result if bias is None else result + _along_channels(bias, x)).to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, spread = ctx.saved_tensors
        groups = ctx.groups
        dy, centred = dy.to(ctx.computed), x.to(ctx.computed) - _of_channels(mean, x)
        sums, products = _parts(dy).sum(2), _parts(dy * centred).sum(2)  # [N, K, C] each, in one reading
        weighted = [value if weight is None else value * weight.to(ctx.computed) for value in (sums, products)]
        per_group = [_grouped(value, groups).sum((1, 3)) * spread for value in weighted]  # [N, G]
        count = x[0].numel() // groups
        scaled = _scale(spread, weight, x)
        shift, slope = per_group[0] / count, per_group[1] * spread.square() / count
        dx = (dy * scaled - _of_channels(shift, x) - centred * _of_channels(slope, x)).to(x.dtype)
        dweight = dbias = None
        if ctx.needs_input_grad[1]:
            dweight = (_grouped(products, groups) * spread[:, None, :, None]).sum((0, 1)).flatten().to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sums.sum((0, 1)).to(ctx.of_bias)
        return dx, dweight, dbias, None, None, None, None


def _parts(x: Tensor) -> Tensor:
    """[N, C, …] as [N, K, positions, C], a view of a channels-last value.

    Inductor splits a reduction with few results itself, into up to four kernels for a group's moments. With this many
    parts one kernel reduces each, and another one the parts of a group.
    """
    batch, channels, positions = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    parts = 1
    if isinstance(positions, int) and isinstance(batch, int):
        most = min(_RESULTS // (batch * channels), positions // _LEAST_POSITIONS)
        parts = next((n for n in range(most, 1, -1) if positions % n == 0), 1)
    return x.movedim(1, -1).reshape(batch, parts, -1, channels)


def _grouped(value: Tensor, groups: int) -> Tensor:
    return value.reshape(*value.shape[:2], groups, -1)  # [N, K, C] as [N, K, G, C / G]


def _of_channels(value: Tensor, like: Tensor) -> Tensor:
    """Repeats [N, G] for the channels of each group, in the shape that broadcasts over space."""
    batch, channels = like.shape[:2]
    repeated = value.unsqueeze(2).expand(-1, -1, channels // value.shape[1])
    return repeated.reshape(batch, channels, *[1] * (like.dim() - 2))


def _scale(spread: Tensor, weight: Tensor | None, like: Tensor) -> Tensor:
    channels = _of_channels(spread, like)
    return channels if weight is None else channels * _along_channels(weight, like)


def _along_channels(vector: Tensor, like: Tensor) -> Tensor:
    return vector.reshape(1, -1, *[1] * (like.dim() - 2))


LIBRARY.impl("channels_last", _ChannelsLast.apply, "CompositeImplicitAutograd")
LIBRARY.impl("weights", _weights, "CompositeImplicitAutograd")
LIBRARY.impl("norm", _Norm.apply, "CompositeImplicitAutograd")
