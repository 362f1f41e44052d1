"""How PyTorch writes each word of the vocabulary: ATen overload → the word, its operands and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx as fx
from torch._ops import OpOverload

from postlude.chain import Setting

aten = torch.ops.aten
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Spelled:
    """An elementwise call as read: nodes or numbers for operands, settings by name."""

    op: str
    operands: tuple[Any, ...]
    settings: tuple[tuple[str, Setting], ...] = ()


Read = Spelled | str  # a sentence where the overload is known but this call of it is not
Reader = Callable[[str, Arguments], Read]


def arguments_of(node: fx.Node) -> Arguments:
    """Every argument of an ATen call by its name in the schema, defaults filled in."""
    assert isinstance(node.target, OpOverload)
    named = {}
    for position, argument in enumerate(node.target._schema.arguments):
        given = (
            node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        )
        named[argument.name] = given
    return named


def _unary(op: str, call: Arguments) -> Read:
    return Spelled(op, (call["self"],))


def _clamp_min(op: str, call: Arguments) -> Read:
    if isinstance(call["min"], (int, float)) and call.get("max") is None:
        return Spelled(op, (call["self"],), (("bound", float(call["min"])),))
    return "clamp is understood only with a lower bound that is a number"


def _leaky(op: str, call: Arguments) -> Read:
    return Spelled(op, (call["self"],), (("slope", float(call["negative_slope"])),))


def _gelu(op: str, call: Arguments) -> Read:
    return Spelled(op, (call["self"],), (("approximate", call["approximate"]),))


def _binary(op: str, call: Arguments) -> Read:
    if call.get("alpha", 1) != 1:
        return f"{op} with alpha={call['alpha']}"
    return Spelled(op, (call["self"], call["other"]))


POINTWISE: dict[str, dict[OpOverload, Reader]] = {
    "relu": {aten.relu.default: _unary},
    "clamp_min": {aten.clamp.default: _clamp_min, aten.clamp_min.default: _clamp_min},
    "leaky_relu": {aten.leaky_relu.default: _leaky},
    "silu": {aten.silu.default: _unary},
    "gelu": {aten.gelu.default: _gelu},
    "add": {aten.add.Tensor: _binary, aten.add.Scalar: _binary},
    "mul": {aten.mul.Tensor: _binary, aten.mul.Scalar: _binary},
}
NORMS: dict[str, OpOverload] = {
    "group_norm": aten.group_norm.default,
    "instance_norm": aten.instance_norm.default,
}
REDUCTIONS: dict[str, OpOverload] = {"mean": aten.mean.dim, "sum": aten.sum.dim_IntList}
CONVOLUTIONS: dict[OpOverload, str] = {
    aten.conv2d.default: "conv2d",
    aten.conv3d.default: "conv3d",
    aten.conv2d.padding: "conv2d",
    aten.conv3d.padding: "conv3d",
    aten.conv_transpose2d.input: "conv_transpose2d",
    aten.conv_transpose3d.input: "conv_transpose3d",
}

_POINTWISE_BY_OVERLOAD = {
    overload: (op, reader) for op, readers in POINTWISE.items() for overload, reader in readers.items()
}
_NORM_BY_OVERLOAD = {overload: op for op, overload in NORMS.items()}
_REDUCTION_BY_OVERLOAD = {overload: op for op, overload in REDUCTIONS.items()}


def pointwise(node: fx.Node) -> Read | None:
    """The elementwise operation that a node spells, a sentence why this call is not one, or None."""
    row = _POINTWISE_BY_OVERLOAD.get(cast(OpOverload, node.target))
    return None if row is None else row[1](row[0], arguments_of(node))


def norm(node: fx.Node) -> str | None:
    return _NORM_BY_OVERLOAD.get(cast(OpOverload, node.target))


def reduction(node: fx.Node) -> str | None:
    return _REDUCTION_BY_OVERLOAD.get(cast(OpOverload, node.target))


def is_convolution(node: fx.Node) -> bool:
    return node.target in CONVOLUTIONS
