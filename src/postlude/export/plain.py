"""Steps of a chain as PyTorch code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from postlude.chain import Cast, Chain, Normalize, Operand, Reduce, Scalar, Slot, Step

POINTWISE: dict[str, Callable[..., str]] = {
    "relu": lambda x: f"F.relu({x})",
    "clamp_min": lambda x, bound: f"{x}.clamp(min={bound!r})",
    "leaky_relu": lambda x, slope: f"F.leaky_relu({x}, {slope!r})",
    "silu": lambda x: f"F.silu({x})",
    "gelu": lambda x, approximate: f"F.gelu({x})" if approximate == "none" else f'F.gelu({x}, approximate="tanh")',
    "add": lambda x, y: f"{x} + {y}",
    "mul": lambda x, y: f"{x} * {y}",
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
    if isinstance(step, Reduce):
        axes = tuple(range(2 if step.over == "space" else 1, 2 + chain.dims))
        return f"value.{step.op}({axes}{', keepdim=True' * step.keepdim})"
    if isinstance(step, Normalize):
        weight, bias = (None if slot is None else names[slot.index] for slot in (step.weight, step.bias))
        if step.groups is None:
            return f"F.instance_norm(value, weight={weight}, bias={bias}, eps={step.eps!r})"
        return f"F.group_norm(value, {step.groups}, {weight}, {bias}, {step.eps!r})"
    others = [_operand(chain, operand, names) for operand in step.operands]
    return POINTWISE[step.op](*others, **dict(step.settings))


def _operand(chain: Chain, operand: Operand, names: Mapping[int, str]) -> str:
    if isinstance(operand, Scalar):
        return repr(operand.value)
    if not isinstance(operand, Slot):
        return "value"
    name = names[operand.index]
    return f"{name}.view(-1{', 1' * chain.dims})" if chain.roles[operand.index] == "channel" else name
