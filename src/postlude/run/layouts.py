"""Operators that keep layouts in a graph. They consist of PyTorch's own operators, so that a compiler fuses them.

`norm` is group_norm or instance_norm in the layout of its input. PyTorch's group_norm on a GPU is contiguous, forward
and backward. Between channels-last convolutions that means one conversion of the value before it, and one of the
gradient in each `convolution_backward` (1.2 ms of the 15.7 ms GPU time of a resnet50_gn training step on an H200). This
operator is a reduction over space and one pass, in both directions.

`weights` is the cast that autocast makes of convolutions' weights, for all weights of a graph at once. As one list they
are one launch of Inductor's instead of one each, and so are the casts of their gradients: a fifth of the launches of a
training step of resnet50_gn. cuDNN returns a gradient channels-last, and autograd would copy it into the weight's own
layout. Here the cast back does that on its way. A weight of a channels-last convolution is cast to that layout:
otherwise `convolution_backward` converts it, which takes an allocation and a launch for each of them (a twelfth of the
host time of a training step of MONAI's UNet).

`channels_last` is a value in that layout, which Inductor does not change.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from postlude.plan.problem import Layout, layout_of, memory_format
from postlude.run.operator import LIBRARY

_RESULTS = 16384  # of a reduction that Inductor does not split: from 64 for each of an H200's 132 multiprocessors on
_LEAST_POSITIONS = 32  # of a part
_FEW_POSITIONS, _MANY_GROUPS = 64, 1024  # a group for each of seven or more warps of every multiprocessor

LIBRARY.define("channels_last(Tensor x) -> Tensor")
LIBRARY.define("weights(Tensor[] weights, ScalarType dtype, bool[] channels_last) -> Tensor[]")
LIBRARY.define(
    "norm(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, ScalarType computed, ScalarType dtype)"
    " -> Tensor"
)


def _held(x: Tensor) -> Tensor:
    """The value in channels-last, which Inductor keeps."""
    from torch._inductor import inductor_prims

    laid_out = x.contiguous(memory_format=memory_format("channels_last", x.dim() - 2))
    found: Tensor = inductor_prims.force_stride_order(laid_out, laid_out.stride())
    return found


class _ChannelsLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return _held(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # noqa: ARG004
        return dy


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, is_last: list[bool], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.specs = [(weight.dtype, layout_of(weight)) for weight in weights]
        layouts: list[Layout] = ["channels_last" if last else layout_of(w) for w, last in zip(weights, is_last)]
        return tuple(_laid_out_at_once([(weight, dtype, layout) for weight, layout in zip(weights, layouts)]))

    @staticmethod
    def backward(ctx: Any, *found: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = [(dy, *spec) for dy, spec in zip(found, ctx.specs) if dy is not None]
        cast = iter(_laid_out_at_once(pairs))
        return None, None, *(None if dy is None else next(cast) for dy in found)


def _laid_out_at_once(asked: list[tuple[Tensor, torch.dtype, Layout]]) -> list[Tensor]:
    """Each tensor in its dtype and layout, by one kernel for all: Inductor computes what an operator on lists reads and
    writes in one kernel, if each part of it is one-dimensional."""
    flat = [_flat(tensor, layout).to(dtype) for tensor, dtype, layout in asked]
    flat = list(torch._foreach_mul(flat, 1.0)) if len(flat) > 1 else flat
    return [_shaped(values, tensor, layout) for values, (tensor, _, layout) in zip(flat, asked)]


def _flat(tensor: Tensor, layout: Layout) -> Tensor:
    """The elements in the order of a layout. Another order than the tensor's is read by index, not as a transposed
    view: Inductor would tile that in two dimensions, and launch a kernel for each tensor."""
    channels, taps = math.prod(tensor.shape[1:2]), math.prod(tensor.shape[2:])  # a bias has neither
    is_last, becomes_last = layout_of(tensor) == "channels_last", layout == "channels_last"
    stored = tensor.movedim(1, -1).reshape(-1) if is_last else tensor.reshape(-1)
    if is_last == becomes_last or taps == 1:
        return stored
    outer, inner = (taps, channels) if becomes_last else (channels, taps)  # of the order that is asked for
    number = torch.arange(stored.numel(), device=tensor.device)
    first, second, third = number // (outer * inner), number // inner % outer, number % inner
    return stored[(first * inner + third) * outer + second]


def _shaped(values: Tensor, like: Tensor, layout: Layout) -> Tensor:
    if layout != "channels_last":
        return values.reshape(like.shape)
    rows, channels, *taps = like.shape
    return values.reshape(rows, *taps, channels).movedim(-1, 1)


def _weights(weights: list[Tensor], dtype: torch.dtype, channels_last: list[bool]) -> list[Tensor]:
    return list(_Weights.apply(dtype, channels_last, *weights))  # type: ignore[no-untyped-call]


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
        mean, variance = _moments(x.to(computed), groups)
        spread = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, spread)
        scaled = _scale(spread, weight, x)
        result = (x.to(computed) - _of_channels(mean, x)) * scaled
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
        scaled_products = products * _repeated(spread, x.shape[1])[:, None]  # [N, K, C]
        if ctx.needs_input_grad[1] and ctx.needs_input_grad[2]:
            dweight, dbias = _summed_together(scaled_products, sums)
        elif ctx.needs_input_grad[1]:
            dweight = scaled_products.sum((0, 1))
        elif ctx.needs_input_grad[2]:
            dbias = sums.sum((0, 1))
        dweight = None if dweight is None else dweight.to(weight.dtype)
        return dx, dweight, None if dbias is None else dbias.to(ctx.of_bias), None, None, None, None


def _moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each group, [N, G] each.

    Channels of few positions are reduced with their group, in one kernel: for 7×7 positions on an H200 that takes 3 and
    14 µs (64 samples of 512 and 2048 channels), by parts 11 and 27; for 14×14 positions it would take 9 instead of 4.
    """
    batch, positions = x.shape[0], math.prod(x.shape[2:])
    are_known = isinstance(positions, int) and isinstance(batch, int)
    if are_known and positions <= _FEW_POSITIONS and batch * groups >= _MANY_GROUPS:
        whole = x.movedim(1, -1).reshape(batch, positions, groups, -1)  # [N, positions, G, C / G]
        variance, mean = torch.var_mean(whole, (1, 3), correction=0)
        return mean, variance
    variance, mean = torch.var_mean(_parts(x), 2, correction=0)  # [N, K, C] each, in one reading
    of_groups = _grouped(mean, groups).mean((1, 3), keepdim=True)  # [N, 1, G, 1]
    apart = (_grouped(mean, groups) - of_groups).square()
    return of_groups.flatten(1), (_grouped(variance, groups) + apart).mean((1, 3))


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


def _summed_together(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of two tensors [N, K, C] over N and K, as one reduction: two kernels of Inductor's, not four."""
    is_first = torch.arange(2, device=one.device).reshape(2, 1, 1, 1) == 0
    both = torch.where(is_first, one, other).sum((1, 2))
    return both[0], both[1]


def _repeated(value: Tensor, channels: int) -> Tensor:
    """[N, G] repeated for the channels of each group."""
    return value.unsqueeze(2).expand(-1, -1, channels // value.shape[1]).reshape(value.shape[0], channels)


def _of_channels(value: Tensor, like: Tensor) -> Tensor:
    """The same in the shape that broadcasts over space."""
    return _repeated(value, like.shape[1]).reshape(*like.shape[:2], *[1] * (like.dim() - 2))


def _scale(spread: Tensor, weight: Tensor | None, like: Tensor) -> Tensor:
    channels = _of_channels(spread, like)
    return channels if weight is None else channels * _along_channels(weight, like)


def _along_channels(vector: Tensor, like: Tensor) -> Tensor:
    return vector.reshape(1, -1, *[1] * (like.dim() - 2))


LIBRARY.impl("channels_last", _ChannelsLast.apply, "CompositeImplicitAutograd")
LIBRARY.impl("weights", _weights, "CompositeImplicitAutograd")
LIBRARY.impl("norm", _Norm.apply, "CompositeImplicitAutograd")
