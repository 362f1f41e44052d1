"""The spellings of each word: from an ATen overload to the word, its operands and settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx as fx
from torch._ops import OpOverload

from postlude.words import Setting

aten = torch.ops.aten
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Spelled:
    """An elementwise call that was read: operands as nodes or numbers, settings by name."""

    op: str
    operands: tuple[Any, ...]
    settings: tuple[tuple[str, Setting], ...] = ()


Read = Spelled | str  # a sentence if the overload is known but this call of it is not supported
Reader = Callable[[str, Arguments], Read | None]  # None: this call of the overload is another kind of step


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


def describe(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default") if node.op == "call_function" else f"{node.op} {node.name}"


def _unary(op: str, call: Arguments) -> Read:
    return Spelled(op, (call["self"],))


def _with(*names: str, **renamed: str) -> Reader:
    """Reads a word whose settings are arguments of the call, with the same names or as `setting="argument"`."""

    def read(op: str, call: Arguments) -> Read:
        return _numbers(op, call, {**dict(zip(names, names)), **renamed})

    return read


def _numbers(op: str, call: Arguments, names: dict[str, str]) -> Read:
    values = [(setting, call[argument]) for setting, argument in names.items()]
    for _, value in values:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"{op} with {value}, which is not a finite number"
    return Spelled(op, (call["self"],), tuple((setting, float(value)) for setting, value in values))


def _given(**settings: float) -> Reader:
    """Reads a spelling that fixes a word's settings."""
    return lambda op, call: Spelled(op, (call["self"],), tuple(settings.items()))


def _clamp(op: str, call: Arguments) -> Read:
    if call["max"] is None:
        return _numbers("clamp_min", call, {"bound": "min"})
    if call["min"] is None:
        return _numbers("clamp_max", call, {"bound": "max"})
    return _numbers(op, call, {"low": "min", "high": "max"})


def _celu(op: str, call: Arguments) -> Read:
    alpha = float(call["alpha"])
    if alpha <= 0:
        return "celu with an alpha that is not positive"
    return Spelled(op, (call["self"],), (("alpha", alpha), ("scale", 1.0), ("input_scale", 1.0 / alpha)))


def _elu(op: str, call: Arguments) -> Read:
    if float(call["input_scale"]) <= 0:
        return "elu with an input_scale that is not positive"
    return _numbers(op, call, {name: name for name in ("alpha", "scale", "input_scale")})


def _gelu(op: str, call: Arguments) -> Read:
    return Spelled(op, (call["self"],), (("approximate", call["approximate"]),))


def _pow(op: str, call: Arguments) -> Read:
    exponent = call["exponent"]
    if not isinstance(exponent, (int, float)) or exponent not in range(1, LARGEST_EXPONENT + 1):
        return f"pow with the exponent {exponent}: only whole ones from 1 to {LARGEST_EXPONENT} are supported"
    return Spelled(op, (call["self"],), (("exponent", int(exponent)),))


def _negated(op: str, call: Arguments) -> Read:
    return Spelled(op, (call["self"], -1.0))


def _binary(op: str, call: Arguments) -> Read:
    alpha, other = call.get("alpha", 1), call["other"]
    if alpha == 1:
        return Spelled(op, (call["self"], other))
    if isinstance(other, (int, float)) and op != "rsub":
        return Spelled(op, (call["self"], other * alpha))
    return f"{op} with alpha={alpha}"


def _prelu(op: str, call: Arguments) -> Read:
    return Spelled(op, (call["self"], call["weight"]))


def _batch_norm(op: str, call: Arguments) -> Read | None:
    """In evaluation; instance_norm that tracks statistics is the same there."""
    if call.get("training") or call.get("use_input_stats"):
        return None
    statistics = (call["running_mean"], call["running_var"])
    if None in statistics:
        return f"{op} in evaluation without running statistics"
    weight, bias = (1.0 if call["weight"] is None else call["weight"]), (0.0 if call["bias"] is None else call["bias"])
    return Spelled(op, (call["input"], *statistics, weight, bias), (("eps", float(call["eps"])),))


LARGEST_EXPONENT = 8
_SELU = {"alpha": 1.6732632423543772848, "scale": 1.0507009873554804934, "input_scale": 1.0}
POINTWISE: dict[str, dict[OpOverload, Reader]] = {
    "relu": {aten.relu.default: _unary},
    "clamp_min": {aten.clamp_min.default: _with(bound="min")},
    "clamp_max": {aten.clamp_max.default: _with(bound="max")},
    "clamp": {aten.clamp.default: _clamp, aten.clip.default: _clamp},
    "hardtanh": {
        aten.hardtanh.default: _with(low="min_val", high="max_val"),
        aten.relu6.default: _given(low=0.0, high=6.0),
    },
    "leaky_relu": {aten.leaky_relu.default: _with(slope="negative_slope")},
    "elu": {aten.elu.default: _elu, aten.celu.default: _celu, aten.selu.default: _given(**_SELU)},
    "silu": {aten.silu.default: _unary},
    "gelu": {aten.gelu.default: _gelu},
    "mish": {aten.mish.default: _unary},
    "hardswish": {aten.hardswish.default: _unary},
    "hardsigmoid": {aten.hardsigmoid.default: _unary},
    "softplus": {aten.softplus.default: _with("beta", "threshold")},
    "tanh": {aten.tanh.default: _unary},
    "sigmoid": {aten.sigmoid.default: _unary},
    "abs": {aten.abs.default: _unary, aten.absolute.default: _unary},
    "sqrt": {aten.sqrt.default: _unary},
    "reciprocal": {aten.reciprocal.default: _unary},
    "pow": {aten.pow.Tensor_Scalar: _pow, aten.square.default: _given(exponent=2)},
    "detach": {aten.detach.default: _unary},
    "add": {aten.add.Tensor: _binary, aten.add.Scalar: _binary},
    "sub": dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar, aten.subtract.Tensor, aten.subtract.Scalar), _binary),
    "rsub": {aten.rsub.Tensor: _binary, aten.rsub.Scalar: _binary},
    "mul": {
        **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor, aten.multiply.Scalar), _binary),
        aten.neg.default: _negated,
        aten.negative.default: _negated,
    },
    "div": dict.fromkeys(
        (
            *(aten.div.Tensor, aten.div.Scalar, aten.divide.Tensor, aten.divide.Scalar),
            *(aten.true_divide.Tensor, aten.true_divide.Scalar),
        ),
        _binary,
    ),
    "rdiv": {},  # in PyTorch a div with the chain's value as the second operand
    "maximum": {aten.maximum.default: _binary, aten.max.other: _binary},
    "minimum": {aten.minimum.default: _binary, aten.min.other: _binary},
    "prelu": {aten.prelu.default: _prelu},
    "batch_norm": {aten.batch_norm.default: _batch_norm, aten.instance_norm.default: _batch_norm},
}
DROPOUTS = (aten.dropout.default, aten.feature_dropout.default)  # graph/dropouts.py writes active ones as products
# Overloads that are known but not supported, and why.
DECLINED: dict[OpOverload, str] = {
    **dict.fromkeys(
        DROPOUTS,  # those that are left
        "active dropout is part of a chain only on a GPU, with known sizes and p below 1",
    ),
    aten.alpha_dropout.default: "alpha_dropout replaces what it drops by a number other than zero",
}
NORMS: dict[str, OpOverload] = {
    "group_norm": aten.group_norm.default,
    "instance_norm": aten.instance_norm.default,
    "batch_norm": aten.batch_norm.default,
    "layer_norm": aten.layer_norm.default,
}
REDUCTIONS: dict[str, tuple[OpOverload, ...]] = {
    "mean": (aten.mean.dim,),
    "sum": (aten.sum.dim_IntList,),
    "adaptive_avg_pool": (aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default),
    "logsumexp": (aten.logsumexp.default,),
    "amax": (aten.amax.default,),
    "amin": (aten.amin.default,),
    "max": (aten.max.dim,),
    "min": (aten.min.dim,),
}
SOFTMAXES: dict[str, tuple[OpOverload, ...]] = {"softmax": (aten.softmax.int,), "log_softmax": (aten.log_softmax.int,)}
POOLS: dict[str, tuple[OpOverload, ...]] = {
    "max_pool": (aten.max_pool2d.default, aten.max_pool3d.default),
    "avg_pool": (aten.avg_pool2d.default, aten.avg_pool3d.default),
}
CONVOLUTIONS: dict[OpOverload, str] = {
    aten.conv2d.default: "conv2d",
    aten.conv3d.default: "conv3d",
    aten.conv2d.padding: "conv2d",
    aten.conv3d.padding: "conv3d",
    aten.conv_transpose2d.input: "conv_transpose2d",
    aten.conv_transpose3d.input: "conv_transpose3d",
}
# Linear layers: the names of the arguments that are input, weight and bias.
LINEARS: dict[OpOverload, tuple[str, str, str | None]] = {
    aten.linear.default: ("input", "weight", "bias"),
    aten.matmul.default: ("self", "other", None),
    aten.mm.default: ("self", "mat2", None),
    aten.addmm.default: ("mat1", "mat2", "self"),
}
_TURNED = (aten.t.default, aten.numpy_T.default, aten.transpose.int, aten.permute.default)  # ways to transpose a matrix

_POINTWISE_BY_OVERLOAD = {
    overload: (op, reader) for op, readers in POINTWISE.items() for overload, reader in readers.items()
}
_NORM_BY_OVERLOAD = {overload: op for op, overload in NORMS.items()}


def pointwise(node: fx.Node) -> Read | None:
    """The elementwise operation that a node computes; a sentence why this call is not supported; None if it is none."""
    target = cast(OpOverload, node.target)
    row = _POINTWISE_BY_OVERLOAD.get(target)
    return DECLINED.get(target) if row is None else row[1](row[0], arguments_of(node))


def norm(node: fx.Node) -> str | None:
    """The norm that a node computes. batch_norm and instance_norm are norms if they use their input's statistics;
    otherwise they are elementwise."""
    op = _NORM_BY_OVERLOAD.get(cast(OpOverload, node.target))
    takes = {"batch_norm": "training", "instance_norm": "use_input_stats"}.get(op or "")
    return op if takes is None or arguments_of(node)[takes] else None


def _reader_of(table: dict[str, tuple[OpOverload, ...]]) -> Callable[[fx.Node], str | None]:
    """A function of a node: the word of this table that it computes, or None."""
    words = {overload: word for word, overloads in table.items() for overload in overloads}
    return lambda node: words.get(cast(OpOverload, node.target))


reduction, softmax, pool = map(_reader_of, (REDUCTIONS, SOFTMAXES, POOLS))


def is_convolution(node: fx.Node) -> bool:
    return node.target in CONVOLUTIONS


def linear_operands(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """Input, weight [out, in] and bias if the node is a linear layer, else None."""
    names = LINEARS.get(cast(OpOverload, node.target))
    if names is None:
        return None
    call = arguments_of(node)
    if call.get("beta", 1) != 1 or call.get("alpha", 1) != 1:
        return None
    x, weight, bias = (call[name] if name is not None else None for name in names)
    return x, weight if node.target is aten.linear.default else _turned(weight), bias


def _turned(node: Any) -> fx.Node | None:
    """The matrix of which a node is the transpose, or None."""
    if not isinstance(node, fx.Node) or node.target not in _TURNED or len(node.meta["val"].shape) != 2:
        return None
    call = arguments_of(node)
    axes = call.get("dims", (call.get("dim0", 0), call.get("dim1", 1)))
    is_same = [axis % 2 for axis in axes] == [0, 1] if "dims" in call else (axes[0] - axes[1]) % 2 == 0
    return None if is_same else call["self"]
