"""Honest implementations that round differently from PyTorch, and points at which rounding decides about kinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cases import Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check.draws import Family
from postlude.check.kinks import Kinks
from postlude.check.modes import RoundedOperands
from postlude.check.points import ChainPoint, tensors_for

Run = Callable[[Chain, Sequence[Tensor]], Tensor]
aten = torch.ops.aten
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Kinked:
    chain: Chain
    shape: tuple[int, ...]


def _volume(channels: tuple[int, int] = (8, 16), **how: Any) -> Builder:
    return Builder(3, conv(3, channels, padding=1, **how))


CHAINS: dict[str, Kinked] = {
    "61": Kinked(Builder(3, conv(3, (8, 16), transposed=True, bias=False)).op("relu").norm(4).chain(), (2, 8, 6, 7, 8)),
    "leaky_relu after a norm": Kinked(_volume().norm(None).op("leaky_relu", slope=0.01).chain(), (2, 8, 6, 7, 8)),
    "relu after a norm": Kinked(_volume().norm(4).op("relu").chain(), (2, 8, 6, 7, 8)),
    "clamp before a norm": Kinked(_volume().op("clamp", low=-0.5, high=0.5).norm(4).chain(), (2, 8, 6, 7, 8)),
    "clamp after a norm": Kinked(_volume().norm(4).op("clamp", low=-1.0, high=1.0).chain(), (2, 8, 6, 7, 8)),
    "relu twice": Kinked(_volume().op("relu").norm(4).op("relu").chain(), (2, 8, 6, 7, 8)),
    "leaky_relu, no norm": Kinked(
        Builder(2, conv(2, (12, 20), padding=1)).op("leaky_relu", slope=0.2).op("mul", "channel").chain(),
        (3, 12, 17, 15),
    ),
    "relu, mean": Kinked(_volume().op("relu").norm(4).reduce("mean", "space").chain(), (4, 8, 6, 7, 8)),
    "hardtanh, hardswish": Kinked(
        _volume().op("hardswish").norm(4).op("hardtanh", low=-1.0, high=1.0).chain(), (2, 8, 6, 7, 8)
    ),
    "no convolution": Kinked(Builder(2).op("relu").norm(4).op("leaky_relu", slope=0.1).chain(), (3, 16, 25, 25)),
    "clamp, no convolution": Kinked(
        Builder(2).op("mul", "channel").op("clamp", low=-0.5, high=1.0).norm(4).chain(), (3, 16, 25, 25)
    ),
    "layer_norm": Kinked(Builder(2, conv(2, (12, 20), padding=1)).layer_norm().op("relu").chain(), (3, 12, 17, 15)),
    "largest of channels": Kinked(_volume().op("relu").norm(4).reduce("amax", "channels").chain(), (2, 8, 6, 7, 8)),
    "maximum, abs": Kinked(_volume().op("maximum", 0.25).norm(4).op("abs").chain(), (2, 8, 6, 7, 8)),
}


class InPlanes(TorchDispatchMode):
    """Convolutions of two half-precision planes, the product of the small ones left out."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten.convolution.default:
            (x, small_x), (w, small_w) = _planes(args[0]), _planes(args[1])
            rest = (None, *args[3:])
            return func(x, w, *args[2:]) + func(x, small_w, *rest) + func(small_x, w, *rest)
        if func is aten.convolution_backward.default:
            (g, small_g), (x, small_x), (w, small_w) = map(_planes, args[:3])
            parts = [func(*three, *args[3:]) for three in ((g, x, w), (g, small_x, small_w), (small_g, x, w))]
            sums = [None if one[0] is None else one[0] + one[1] + one[2] for one in zip(*parts, strict=True)]
            # The bias's gradient reads one operand only.
            bias = None if sums[2] is None else parts[0][2] + parts[2][2]
            return sums[0], sums[1], bias
        return func(*args, **(kwargs or {}))


def _planes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    scale = 2.0 ** torch.floor(torch.log2(1024.0 / tensor.abs().max().clamp(min=1e-30)))
    large = (tensor * scale).half().float()
    return large / scale, (tensor * scale - large).half().float() / scale


class _Elsewhere(torch.autograd.Function):
    """A chain evaluated in some way of its own, whose backward pass is that way's as well."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, how: Candidate, *tensors: Tensor) -> Tensor:
        leaves = [tensor.detach().to(how.dtype or tensor.dtype).requires_grad_() for tensor in tensors]
        with torch.enable_grad(), how.mode():
            ctx.output = how.evaluate(chain, leaves)
        ctx.how, ctx.leaves, ctx.dtypes = how, leaves, [tensor.dtype for tensor in tensors]
        return ctx.output.detach().to(tensors[0].dtype)

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> Any:
        with ctx.how.mode():
            found = torch.autograd.grad(ctx.output, ctx.leaves, weights.to(ctx.output.dtype), allow_unused=True)
        pairs = zip(found, ctx.dtypes, strict=True)
        return None, None, *(None if one is None else one.to(dtype) for one, dtype in pairs)


def _by_torch(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    return reference.evaluate(chain, tensors)


def _channels_backwards(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    """The same sums in another order: input channels from the last to the first, samples one at a time."""
    if chain.producer is None:
        return reference.evaluate(chain, tensors)
    axis = 0 if chain.producer.transposed else 1
    return reference.evaluate(chain, [tensors[0].flip(1), tensors[1].flip(axis), *tensors[2:]])


@dataclass(frozen=True)
class Candidate:
    """An honest way to compute a chain."""

    mode: Callable[[], Any] = nullcontext
    dtype: torch.dtype | None = None
    evaluate: Run = _by_torch

    def __call__(self, chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        result: Tensor = _Elsewhere.apply(chain, self, *tensors)  # type: ignore[no-untyped-call]
        return result


EXACT = {
    "float64": Candidate(dtype=torch.float64),
    "another order": Candidate(evaluate=_channels_backwards),
    "two planes": Candidate(mode=InPlanes, dtype=torch.float32),
}
CANDIDATES: dict[str, dict[str, Candidate]] = {
    "fp32": EXACT,
    "tf32": {**EXACT, "rounded operands": Candidate(mode=lambda: RoundedOperands("tf32"))},
    "fp16": {"float32 inside": Candidate(dtype=torch.float32), **EXACT},
    "bf16": {"float32 inside": Candidate(dtype=torch.float32), **EXACT},
}


def points(
    kinked: Kinked, dtype: torch.dtype, seed: int, device: str = "cpu", beyond: float = 0.0
) -> Iterator[ChainPoint]:
    """Points as for a site, but at every operator with a kink one value is within a rounding error of it."""
    for place in range(6):
        family: Family = ("hierarchical", "normal", "uniform")[place % 3]
        tensors = tensors_for(kinked.chain, kinked.shape, dtype, device, 100 * seed + place, family)
        yield ChainPoint(planted(kinked.chain, tensors, beyond), family)
    for place in range(5):
        tensors = tensors_for(kinked.chain, kinked.shape, dtype, device, 100 * seed + 50 + place, "large offset")
        yield ChainPoint(tensors, "large offset")


def planted(chain: Chain, tensors: Sequence[Tensor], beyond: float = 0.0) -> tuple[Tensor, ...]:
    """Moves the value nearest to a kink onto it, for each operator: by the one input that it depends on most."""
    x = tensors[0].clone()
    for call in range(len(_arguments(chain, (x, *tensors[1:]))[1].meetings)):
        for _ in range(3):  # a norm is not linear
            leaf, kinks = _arguments(chain, (x, *tensors[1:]))
            one = kinks.meetings[call]
            if not one.moves:
                break
            gap = (one.value - one.nearest(one.value)).flatten()
            place = int(gap.abs().argmin())
            slopes = torch.autograd.grad(kinks.arguments[call].flatten()[place], leaf)[0].flatten()
            most = int(slopes.abs().argmax())
            x.flatten()[most] -= ((gap[place] - beyond) / slopes[most]).to(x.dtype)
    return (x, *tensors[1:])


class _Arguments(Kinks):
    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = len(self.meetings)
        result = super().__torch_function__(func, types, args, kwargs)
        self.arguments += args[:1] * (len(self.meetings) - before)
        return result


def _arguments(chain: Chain, tensors: Sequence[Tensor]) -> tuple[Tensor, _Arguments]:
    doubles = [tensor.detach().double() for tensor in tensors]
    doubles[0].requires_grad_()
    with _Arguments() as kinks:
        reference.evaluate(chain, doubles, dtype=torch.float64)
    return doubles[0], kinks
