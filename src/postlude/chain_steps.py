"""The steps of a chain: what each does, and the values, tensors and numbers that it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from postlude.windows import Windows
from postlude.words import NORMS, Setting


@dataclass(frozen=True)
class Value:
    index: int


@dataclass(frozen=True)
class Slot:
    index: int


@dataclass(frozen=True)
class Scalar:
    value: float


Operand = Value | Slot | Scalar


@dataclass(frozen=True)
class Pointwise:
    """One elementwise operation. Operands other than values are broadcast over the first one."""

    op: str
    operands: tuple[Operand, ...]
    settings: tuple[tuple[str, Setting], ...] = ()


@dataclass(frozen=True)
class Normalize:
    """Barrier: subtracts the mean and divides by the standard deviation of what `over` names."""

    op: str
    operand: Value
    groups: int | None  # None: one group per channel
    eps: float
    weight: Slot | None = None
    bias: Slot | None = None
    axes: int = 0  # layer_norm: how many of the last axes form a row
    running: tuple[Slot, Slot] | None = None  # batch_norm: running mean and variance, updated by every forward pass
    momentum: float = 0.0  # the weight of the batch's statistics in that update

    @property
    def over(self) -> str:
        """ "sample": groups of channels of each sample; "batch": channels of all samples; "row": the last axes."""
        return NORMS[self.op]


@dataclass(frozen=True)
class Reduce:
    """Barrier: reduces over space, over everything but the batch, or over channels.

    The features of a linear layer are channels and everything but the batch alike.
    """

    op: str
    operand: Value
    over: Literal["space", "sample", "channels"]
    keepdim: bool = False


@dataclass(frozen=True)
class Pool:
    """Barrier: the result has one position for each window."""

    op: str
    operand: Value
    windows: Windows
    counts_padding: bool = True  # avg_pool: positions in the padding count as zeros
    divisor: int | None = None  # avg_pool: replaces the number of positions

    def __str__(self) -> str:
        more = [] if self.counts_padding else ["without padding"]
        more += [] if self.divisor is None else [f"divided by {self.divisor}"]
        return f"{self.op}({', '.join([str(self.windows), *more])})"


@dataclass(frozen=True)
class Softmax:
    """Barrier: softmax over channels."""

    op: str
    operand: Value
    eps: float = 0.0  # of normalize


@dataclass(frozen=True)
class Cast:
    """A cast that autocast or the model makes between two steps."""

    operand: Value
    dtype: str


Step = Pointwise | Normalize | Reduce | Pool | Softmax | Cast


def operands_of(step: Step) -> tuple[Operand, ...]:
    """Everything that a step reads, its main operand first."""
    if isinstance(step, Pointwise):
        return step.operands
    if isinstance(step, Normalize):
        return (step.operand, *(slot for slot in (step.weight, step.bias) if slot is not None))
    return (step.operand,)


def with_operands(step: Step, change: Callable[[Operand], Operand]) -> Step:
    """The same step with each of its operands, a norm's running statistics among them, changed."""

    def changed(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(changed, part))
        return change(part) if isinstance(part, Operand) else part

    return dataclasses.replace(step, **{name: changed(part) for name, part in vars(step).items()})


def values_of(step: Step) -> tuple[Value, ...]:
    return tuple(operand for operand in operands_of(step) if isinstance(operand, Value))
