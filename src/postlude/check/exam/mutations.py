"""Mistakes that a kernel's author could make, as changes of single operator calls.

Each function takes the arguments of a call and returns names and changes. A change takes the operator and its arguments
and returns what the mistaken kernel would. If a result is several tensors (norms), the first one is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Args = tuple[Any, ...]
Run = Callable[..., Any]
Change = Callable[[Run, Args], Any]
Changes = Iterator[tuple[str, Change]]
CHUNKS = 4  # partial sums of a half-precision accumulator


def put(args: Args, **places: Any) -> Args:
    """The arguments with some of them replaced: _3=value is the fourth."""
    changed = list(args)
    for place, value in places.items():
        changed[int(place[1:])] = value
    return tuple(changed)


def with_args(**places: Callable[[Args], Any]) -> Change:
    """The operator itself, called with other arguments."""
    return lambda run, args: run(*put(args, **{place: made(args) for place, made in places.items()}))


def _with_number(place: int, number: float) -> Change:
    return lambda run, args: run(*put(args, **{f"_{place}": number}))


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half().to(tensor.dtype)


def _convolution(args: Args) -> Changes:
    weight, bias, transposed, groups = args[1], args[2], args[6], args[8]
    if weight[0, 0].numel() > 1:
        yield "kernel flipped", with_args(_1=lambda a: a[1].flip(*range(2, a[1].dim())))
        yield "last tap left out", with_args(_1=lambda a: _without_last_tap(a[1]))
    if min(weight.shape[:2]) > 1:
        yield "weight read as (out, in)", with_args(_1=lambda a: _misread(a[1]))
    if bias is not None:
        yield "no bias", with_args(_2=lambda a: torch.zeros_like(a[2]))
        yield "bias of the next channel", with_args(_2=lambda a: a[2].roll(1))
    yield "operands in half precision", with_args(_0=lambda a: _halved(a[0]), _1=lambda a: _halved(a[1]))
    if groups == 1 and args[0].shape[1] > 1:
        axis = 0 if transposed else 1
        yield "sums in half precision", lambda run, a: _convolved_in_half(run, a, axis)


def _without_last_tap(weight: Tensor) -> Tensor:
    changed = weight.clone()
    changed.flatten(2)[..., -1] = 0
    return changed


def _misread(weight: Tensor) -> Tensor:
    return weight.reshape(weight.shape[1], weight.shape[0], *weight.shape[2:]).transpose(0, 1)


def _convolved_in_half(run: Run, args: Args, axis: int) -> Tensor:
    pieces = zip(args[0].tensor_split(CHUNKS, 1), args[1].tensor_split(CHUNKS, axis))
    total: Any = 0
    for x, weight in pieces:
        if x.shape[1]:
            total = _halved(total + run(*put(args, _0=x, _1=weight, _2=None)))
    found: Tensor = total if args[2] is None else total + args[2].view(-1, *[1] * (total.dim() - 2))
    return found


def _addmm(args: Args) -> Changes:
    yield "no bias", with_args(_0=lambda a: torch.zeros_like(a[0]))
    yield "bias of the next channel", with_args(_0=lambda a: a[0].roll(1, -1))
    yield from _products(1)(args)


def _products(first: int) -> Callable[[Args], Changes]:
    """Changes of a product of two operands, the arguments from `first` on."""
    left, right = f"_{first}", f"_{first + 1}"

    def changes(args: Args) -> Changes:
        both = {left: lambda a: _halved(a[first]), right: lambda a: _halved(a[first + 1])}
        yield "operands in half precision", with_args(**both)
        if args[first].shape[-1] > 1:
            yield "sums in half precision", lambda run, a: _multiplied_in_half(run, a, first)

    return changes


def _multiplied_in_half(run: Run, args: Args, first: int) -> Tensor:
    pieces = zip(args[first].tensor_split(CHUNKS, -1), args[first + 1].tensor_split(CHUNKS, -2))
    total = args[0] if first else torch.zeros_like(run(*args))
    for a, b in pieces:
        total = _halved(total + a @ b)
    return total


def _affine(weight: int, bias: int) -> Callable[[Args], Changes]:
    def changes(args: Args) -> Changes:
        if args[weight] is not None:
            yield "no γ", with_args(**{f"_{weight}": lambda a: torch.ones_like(a[weight])})
            yield "γ of the next channel", with_args(**{f"_{weight}": lambda a: a[weight].roll(1)})
        if args[bias] is not None:
            yield "no β", with_args(**{f"_{bias}": lambda a: torch.zeros_like(a[bias])})

    return changes


def _eps(place: int) -> Callable[[Args], Changes]:
    def changes(args: Args) -> Changes:
        if args[place] > 0:
            yield "eps 100 times too large", with_args(**{f"_{place}": lambda a: 100 * a[place]})
            yield "no eps", with_args(**{f"_{place}": lambda a: 1e-6 * a[place]})

    return changes


def _group_norm(args: Args) -> Changes:
    channels, groups = args[4], args[6]
    yield from _affine(1, 2)(args)
    yield from _eps(7)(args)
    yield "unbiased variance", lambda run, a: (_normalised(a, (2, 3), correction=1), *run(*a)[1:])
    yield "statistics per position", lambda run, a: (_normalised(a, (2,)), *run(*a)[1:])
    yield "statistics over the batch", lambda run, a: (_normalised(a, (0, 2, 3)), *run(*a)[1:])
    yield "mean not subtracted", lambda run, a: (_normalised(a, (2, 3), centred=False), *run(*a)[1:])
    other = [count for count in range(1, channels + 1) if channels % count == 0 and count != groups]
    for count in sorted(other, key=lambda count: abs(count - groups))[:2]:
        yield f"{count} groups", _with_number(6, count)
    if args[1] is not None and groups < channels:
        yield "γ per group", with_args(_1=lambda a: a[1][: a[6]].repeat_interleave(a[4] // a[6]))


def _normalised(args: Args, axes: Sequence[int], correction: int = 0, centred: bool = True) -> Tensor:
    x, weight, bias, _, channels, _, groups, eps = args
    parts = x.reshape(x.shape[0], groups, channels // groups, -1)
    variance, mean = torch.var_mean(parts, list(axes), correction=correction, keepdim=True)
    parts = (parts - mean if centred else parts) * torch.rsqrt(variance + eps)
    y: Tensor = parts.reshape(x.shape)
    shape = (-1, *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def _batch_norm(args: Args) -> Changes:
    yield from _affine(1, 2)(args)
    yield from _eps(7)(args)
    if args[3] is not None:
        yield "the other statistics", with_args(_5=lambda a: not a[5])
        yield "running statistics not updated", lambda run, a: run(*put(a, _3=a[3].clone(), _4=a[4].clone()))


def _layer_norm(args: Args) -> Changes:
    yield from _affine(2, 3)(args)
    yield from _eps(4)(args)


def _swap(name: str, function: Callable[[Tensor], Tensor]) -> tuple[str, Change]:
    return name, lambda _, args: function(args[0])


_RELU = (
    _swap("leaky", lambda x: F.leaky_relu(x, 0.1)),
    _swap("absolute value", torch.abs),
    _swap("gelu", F.gelu),
    _swap("NaN made 0", lambda x: torch.where(x > 0, x, torch.zeros_like(x))),
)
_SWAPS: dict[str, tuple[tuple[str, Change], ...]] = {
    "relu": _RELU,
    "silu": (_swap("hardswish", F.hardswish), _swap("gelu", F.gelu)),
    "gelu": (_swap("silu", F.silu), _swap("tanh's form", lambda x: F.gelu(x, approximate="tanh"))),
    "mish": (_swap("silu", F.silu),),
    "hardswish": (_swap("silu", F.silu),),
    "hardsigmoid": (_swap("sigmoid", torch.sigmoid),),
    "sigmoid": (_swap("hardsigmoid", F.hardsigmoid), _swap("tanh", torch.tanh)),
    "tanh": (_swap("clamp", lambda x: x.clamp(-1, 1)), _swap("sigmoid", torch.sigmoid)),
    "softplus": (_swap("relu", torch.relu),),
    "elu": (_swap("relu", torch.relu),),
    "exp": (_swap("first terms", lambda x: 1 + x + x * x / 2),),
}


def _slope(_: Args) -> Changes:
    yield "slope twice as large", lambda run, a: run(a[0], 2 * (a[1] if len(a) > 1 else 0.01))
    yield "relu", lambda _, a: torch.relu(a[0])


def _clamped(args: Args) -> Changes:
    for place, name in ((1, "lower"), (2, "upper")):
        if len(args) > place and isinstance(args[place], (int, float)):
            step = 0.1 * (abs(args[place]) or 1.0)
            yield f"{name} bound moved", _with_number(place, args[place] + step)
            yield f"no {name} bound", _with_number(place, -1e30 if place == 1 else 1e30)


def _two_operands(name: str, other: Callable[[Any, Any], Tensor]) -> Callable[[Args], Changes]:
    def changes(args: Args) -> Changes:
        yield name, lambda _, a: other(a[0], a[1])
        if isinstance(args[1], (int, float)):
            yield "number a tenth too large", with_args(_1=lambda a: 1.1 * a[1])

    return changes


def _mean(_: Args) -> Changes:
    yield "divided by one less", lambda run, a: run(*a) * (_count(run, a) / max(_count(run, a) - 1, 1))
    yield "sum", lambda run, a: run(*a) * _count(run, a)


def _count(run: Run, args: Args) -> int:
    return int(args[0].numel() // max(run(*args).numel(), 1))


def _sum(_: Args) -> Changes:
    yield "mean", lambda run, a: run(*a) / _count(run, a)


def _pool(average: Callable[..., Tensor]) -> Callable[[Args], Changes]:
    def changes(args: Args) -> Changes:
        if len(args) < 4 or not any(args[3]):
            yield "average in place of maximum", lambda run, a: (average(a[0], *a[1:3]), *run(*a)[1:])

    return changes


def _softmax(_: Args) -> Changes:
    yield "other dimension", lambda run, a: run(a[0], (a[1] - 1) % a[0].dim(), *a[2:])
    yield "no division", lambda _, a: (a[0] - a[0].amax(a[1], keepdim=True)).exp()


def _extreme(other: Callable[..., Any]) -> Callable[[Args], Changes]:
    return lambda _: iter([("the other extreme", lambda _, a: other(*a))])


TABLE: dict[str, Callable[[Args], Changes]] = {
    "convolution": _convolution,
    "addmm": _addmm,
    "mm": _products(0),
    "bmm": _products(0),
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), _batch_norm),
    **dict.fromkeys(("clamp", "hardtanh", "clamp_min"), _clamped),
    "leaky_relu": _slope,
    "add": _two_operands("subtraction", torch.sub),
    "sub": _two_operands("addition", torch.add),
    "mul": _two_operands("addition", torch.add),
    "div": _two_operands("multiplication", torch.mul),
    "minimum": _two_operands("maximum", torch.maximum),
    "maximum": _two_operands("minimum", torch.minimum),
    "mean": _mean,
    "sum": _sum,
    "_softmax": _softmax,
    "amax": _extreme(torch.amin),
    "amin": _extreme(torch.amax),
    "max_pool2d_with_indices": _pool(F.avg_pool2d),
    "max_pool3d_with_indices": _pool(F.avg_pool3d),
}


def changes_of(operator: str, args: Args) -> Changes:
    """The changes for this operator."""
    if operator in TABLE:
        yield from TABLE[operator](args)
    yield from _SWAPS.get(operator, ())
