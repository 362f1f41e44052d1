"""Steps of a chain as PyTorch code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from postlude import words
from postlude.chain import Cast, Chain, Normalize, Operand, Reduce, Scalar, Slot, Step

Writer = Callable[..., str]


def _call(function: str) -> Writer:
    """A function of the operands, then of the settings in their order."""
    return lambda *operands, **settings: f"{function}({', '.join([*operands, *map(repr, settings.values())])})"


def _infix(sign: str, swapped: bool = False) -> Writer:
    return lambda x, y: f"{y} {sign} {x}" if swapped else f"{x} {sign} {y}"


def _larger_or_smaller(function: str) -> Writer:
    return lambda x, y: f"{function}({x}, {f'torch.full_like({x}, {y})' if _is_number(y) else y})"


def _elu(x: str, alpha: float, scale: float, input_scale: float) -> str:
    if scale == input_scale == 1.0:
        return f"F.elu({x}, {alpha!r})"
    return f"torch.ops.aten.elu({x}, {alpha!r}, {scale!r}, {input_scale!r})"


def _batch_norm(x: str, mean: str, variance: str, weight: str, bias: str, eps: float) -> str:
    weight, bias = (None if _is_number(vector) else vector for vector in (weight, bias))  # type: ignore[assignment]
    return f"F.batch_norm({x}, {mean}, {variance}, {weight}, {bias}, eps={eps!r})"


def _is_number(text: str) -> bool:
    return re.match(r"[-\d]", text) is not None


POINTWISE: dict[str, Writer] = {
    "relu": _call("F.relu"),
    "clamp_min": lambda x, bound: f"{x}.clamp(min={bound!r})",
    "clamp_max": lambda x, bound: f"{x}.clamp(max={bound!r})",
    "clamp": _call("torch.clamp"),
    "hardtanh": _call("F.hardtanh"),
    "leaky_relu": _call("F.leaky_relu"),
    "elu": _elu,
    "silu": _call("F.silu"),
    "gelu": lambda x, approximate: f"F.gelu({x})" if approximate == "none" else f'F.gelu({x}, approximate="tanh")',
    "mish": _call("F.mish"),
    "hardswish": _call("F.hardswish"),
    "hardsigmoid": _call("F.hardsigmoid"),
    "softplus": _call("F.softplus"),
    "tanh": _call("torch.tanh"),
    "sigmoid": _call("torch.sigmoid"),
    "abs": _call("torch.abs"),
    "sqrt": _call("torch.sqrt"),
    "reciprocal": _call("torch.reciprocal"),
    "pow": _call("torch.pow"),
    "detach": lambda x: f"{x}.detach()",
    "add": _infix("+"),
    "sub": _infix("-"),
    "rsub": _infix("-", swapped=True),
    "mul": _infix("*"),
    "div": _infix("/"),
    "rdiv": _infix("/", swapped=True),
    "maximum": _larger_or_smaller("torch.maximum"),
    "minimum": _larger_or_smaller("torch.minimum"),
    "prelu": _call("F.prelu"),
    "batch_norm": _batch_norm,
}


def plain_steps(chain: Chain, first: int, names: Mapping[int, str]) -> list[str]:
    """Statements for the steps from `first` on, whose values all go by the name `value`."""
    return [f"value = {_step(chain, step, names)}" for step in chain.steps[first - 1 :]]


def renamed_steps(chain: Chain, first: int, names: Mapping[int, str], word: str) -> list[str]:
    """The same by another name."""
    return [re.sub(r"\bvalue\b", word, line) for line in plain_steps(chain, first, names)]


def _step(chain: Chain, step: Step, names: Mapping[int, str]) -> str:
    if isinstance(step, Cast):
        return f"value.to(torch.{step.dtype})"
    if isinstance(step, Reduce) and step.op == "adaptive_avg_pool":
        return f"F.adaptive_avg_pool{chain.dims}d(value, 1)"
    if isinstance(step, Reduce) and step.over == "channels":
        values = ".values" if step.op in ("max", "min") else ""
        return f"torch.{step.op}(value, dim=1{', keepdim=True' * step.keepdim}){values}"
    if isinstance(step, Reduce):
        axes = tuple(range(2 if step.over == "space" else 1, 2 + chain.dims))
        return f"value.{step.op}({axes}{', keepdim=True' * step.keepdim})"
    if isinstance(step, Normalize):
        weight, bias = (None if slot is None else names[slot.index] for slot in (step.weight, step.bias))
        if step.groups is None:
            return f"F.instance_norm(value, weight={weight}, bias={bias}, eps={step.eps!r})"
        return f"F.group_norm(value, {step.groups}, {weight}, {bias}, {step.eps!r})"
    takes_vectors = words.POINTWISE[step.op].vectors
    others = [_operand(chain, operand, names, takes_vectors) for operand in step.operands]
    return POINTWISE[step.op](*others, **dict(step.settings))


def _operand(chain: Chain, operand: Operand, names: Mapping[int, str], as_vector: bool = False) -> str:
    if isinstance(operand, Scalar):
        return repr(operand.value)
    if not isinstance(operand, Slot):
        return "value"
    name = names[operand.index]
    is_spread = chain.roles[operand.index] == "channel" and not as_vector
    return f"{name}.view(-1{', 1' * chain.dims})" if is_spread else name
