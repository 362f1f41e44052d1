"""What is computed: an optional convolution or linear layer, then a short straight-line program over its result.

A `Chain` is frozen and hashable and holds no tensors. It refers to its tensor arguments by position (`Slot`) and to
intermediate results by number (`Value`):

    Value(0)      the result of the convolution or linear layer, or the chain's input if there is none
    Value(i)      the result of step i, counting from 1

A value may be used more than once (residuals, x·sigmoid(x)); the last one is the chain's result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from postlude import encoded
from postlude.chain_steps import Cast as Cast
from postlude.chain_steps import Normalize as Normalize
from postlude.chain_steps import Operand as Operand
from postlude.chain_steps import Pointwise as Pointwise
from postlude.chain_steps import Pool as Pool
from postlude.chain_steps import Reduce as Reduce
from postlude.chain_steps import Scalar as Scalar
from postlude.chain_steps import Slot as Slot
from postlude.chain_steps import Softmax as Softmax
from postlude.chain_steps import Step as Step
from postlude.chain_steps import Value as Value
from postlude.chain_steps import operands_of as operands_of
from postlude.chain_steps import values_of as values_of
from postlude.chain_steps import with_operands as with_operands
from postlude.convolution import Convolution as Convolution
from postlude.convolution import linear as linear
from postlude.windows import Windows
from postlude.words import LENGTHS as LENGTHS
from postlude.words import NORMS, POOLS, REDUCTIONS, SPANS
from postlude.words import POINTWISE as POINTWISE
from postlude.words import SOFTMAXES as SOFTMAXES

# A tensor has one number per element (full), per channel, per sample and channel (row), per position along the last
# axes (last), or one in all (one). A running statistic has one per channel, and the chain updates it.
Role = Literal["input", "weight", "bias", "channel", "full", "row", "one", "last", "running"]


@dataclass(frozen=True)
class Chain:
    """What is computed: an optional producer and the steps after it, without tensors.

    Attributes:
        dims: Spatial axes of its values: 2 or 3; 0 after a linear layer.
        producer: The convolution or linear layer at its start, if there is one.
        steps: The steps, in order.
        roles: What each tensor of a call is, such as "input", "weight" or "channel".
    """

    dims: int
    producer: Convolution | None
    steps: tuple[Step, ...]
    roles: tuple[Role, ...]

    def __post_init__(self) -> None:
        problem = next(_mistakes(self), None)
        if problem is not None:
            raise ValueError(f"not a chain: {problem}")

    @property
    def convolution(self) -> Convolution:
        """The producer; the chain must have one."""
        assert self.producer is not None
        return self.producer

    @functools.cached_property
    def is_linear(self) -> bool:
        """Whether the producer is a linear layer; the chain's values are then matrices."""
        return self.producer is not None and self.producer.is_linear

    def first(self, kinds: type[Step] | tuple[type[Step], ...], last: int | None = None) -> int | None:
        """The number of the first step of one of these kinds, among all or up to step `last`."""
        numbers = (number for number, step in enumerate(self.steps[:last], 1) if isinstance(step, kinds))
        return next(numbers, None)

    @functools.cached_property
    def last_uses(self) -> dict[int, int]:
        """Value index → number of the last step that reads it (the result counts as read after the end)."""
        uses = {value.index: number for number, step in enumerate(self.steps, 1) for value in values_of(step)}
        uses[len(self.steps)] = len(self.steps) + 1
        return uses

    @functools.cached_property
    def moved(self) -> tuple[int, ...]:
        """The slots that a call of the chain updates: running statistics."""
        return tuple(slot for slot, role in enumerate(self.roles) if role == "running")

    @functools.cached_property
    def detached(self) -> tuple[int, ...]:
        """The slots that the result's gradient does not reach: each of their paths to it goes through `detach`."""
        values, slots = {len(self.steps)}, set[int]()
        for number, step in reversed([*enumerate(self.steps, 1)]):
            if number in values and not (isinstance(step, Pointwise) and step.op == "detach"):
                values.update(value.index for value in values_of(step))
                slots.update(operand.index for operand in operands_of(step) if isinstance(operand, Slot))
        first = ("input", "weight", "bias") if 0 in values else ()
        reached = [slot in slots or role in first for slot, role in enumerate(self.roles)]
        return tuple(slot for slot in range(len(reached)) if not reached[slot] and slot not in self.moved)

    def dumps(self) -> str:
        """The chain as text, which `loads` reads."""
        return encoded.dumps(self)

    @staticmethod
    def loads(text: str) -> Chain:
        """The chain that `dumps` wrote; raises TypeError or ValueError for another text."""
        chain = encoded.loads(text, CLASSES)
        if not isinstance(chain, Chain):
            raise TypeError("the text does not describe a chain")
        return chain

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # chains are looked up on every call, and never change
        return hash((self.dims, self.producer, self.steps, self.roles))

    def words(self) -> list[str]:
        """One word per step."""
        return [_word(step, number, self) for number, step in enumerate(self.steps, 1)]

    def __str__(self) -> str:
        return " → ".join(([str(self.producer)] if self.producer else []) + self.words())


def _mistakes(chain: Chain) -> Any:
    expected = ["input"]
    if chain.producer is not None:
        expected += ["weight"] + ["bias"] * chain.producer.has_bias
        if chain.producer.dims != chain.dims:
            yield f"a {chain.producer.dims}-D convolution in a {chain.dims}-D chain"
    if list(chain.roles[: len(expected)]) != expected or not {"input", "weight", "bias"}.isdisjoint(
        chain.roles[len(expected) :]
    ):
        yield f"slots start with {', '.join(expected)}, not {', '.join(chain.roles)}"
    reduced: Reduce | None = None
    for number, step in enumerate(chain.steps, 1):
        for operand in operands_of(step):
            if isinstance(operand, Value) and not 0 <= operand.index < number:
                yield f"step {number} reads value {operand.index}, which does not exist yet"
            if isinstance(operand, Slot) and not 0 < operand.index < len(chain.roles):
                yield f"step {number} reads slot {operand.index}, which does not exist"
            if isinstance(operand, Slot) and reduced is not None and not _may_follow(operand, reduced, chain.roles):
                yield f"step {number} reads a tensor after a reduction"
            if isinstance(operand, Scalar) and not math.isfinite(operand.value):
                yield f"step {number} reads a number that is not finite"
        if isinstance(step, Pointwise):
            row = POINTWISE.get(step.op)
            if row is None:
                yield f"unknown operation {step.op}"
            elif len(step.operands) != row.arity or tuple(name for name, _ in step.settings) != row.settings:
                yield f"{step.op} takes {row.arity} operands and settings {row.settings}"
            elif not isinstance(step.operands[0], Value):
                yield f"{step.op}'s first operand must be a value"
        elif isinstance(step, Normalize):
            yield from _norm_mistakes(step, chain)
        elif isinstance(step, Reduce):
            if step.over not in REDUCTIONS.get(step.op, ()):
                yield f"unknown reduction {step.op} over {step.over}"
            reduced = step
        elif isinstance(step, Softmax) and step.op not in (SOFTMAXES + LENGTHS if chain.dims else SOFTMAXES):
            yield f"unknown softmax {step.op}"
        elif isinstance(step, Pool):
            yield from _pool_mistakes(step, number, chain)


def _may_follow(slot: Slot, reduced: Reduce, roles: tuple[Role, ...]) -> bool:
    """Whether a step after a reduction may read this slot. After one over channels, only a single number."""
    return reduced.over == "channels" and slot.index < len(roles) and roles[slot.index] == "one"


def _pool_mistakes(step: Pool, number: int, chain: Chain) -> Iterator[str]:
    sizes = (step.windows.kernel, step.windows.stride, step.windows.padding)
    axes = chain.dims or 1  # the features of a linear layer
    if step.op not in POOLS or any(len(each) != axes for each in sizes):
        yield f"unknown pool {step}"
    if any(value.index < number for later in chain.steps[number:] for value in values_of(later)):
        yield f"a step after the pool reads a value from before step {number}"
    read = [operand for later in chain.steps[number:] for operand in operands_of(later) if isinstance(operand, Slot)]
    if any(slot.index < len(chain.roles) and chain.roles[slot.index] in ("full", "row") for slot in read):
        yield "a step after the pool reads a tensor of more than one number per channel"


def _norm_mistakes(step: Normalize, chain: Chain) -> Iterator[str]:
    if step.op not in NORMS:
        yield f"unknown norm {step.op}"
    elif (step.over == "row") != (0 < step.axes <= chain.dims + 1):
        yield f"{step.op} over {step.axes} of the last axes"
    if any(not 0 < slot.index < len(chain.roles) or slot.index not in chain.moved for slot in step.running or ()):
        yield f"{step.op} moves a tensor that is no running statistic"


def _word(step: Step, number: int, chain: Chain) -> str:
    roles = chain.roles
    if isinstance(step, Cast):
        return f"to {step.dtype}"
    if isinstance(step, Normalize):
        if step.over == "row":
            return f"{step.op} over the last {f'{step.axes} axes' if step.axes > 1 else 'axis'}"
        of = "batch" if step.over == "batch" else step.groups
        return f"{step.op}({of})" if of else step.op
    if isinstance(step, Pool):
        return str(step)
    if isinstance(step, Softmax):
        return f"{step.op} over {'channels' if chain.dims else 'features'}"
    if isinstance(step, Reduce):
        return f"{step.op} over {SPANS[step.over] if chain.dims else 'features'}"
    first, *others = step.operands
    words = _settings(step)
    if first != Value(number - 1):
        words.append(_operand(first, roles))
    named = [_operand(operand, roles) for operand in others]
    words += dict.fromkeys(named) if POINTWISE[step.op].vectors else named
    return f"{step.op}({', '.join(words)})" if words else step.op


def _settings(step: Pointwise) -> list[str]:
    """The settings as text, up to the last one that is not a default."""
    values, usual = [value for _, value in step.settings], POINTWISE[step.op].usual
    while values and usual[len(values) - 1 : len(values)] == (values[-1],):
        values.pop()
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in values]


_ROLES = {"channel": "per channel", "full": "tensor", "row": "per sample and channel", "one": "one number"}


def _operand(operand: Operand, roles: tuple[Role, ...]) -> str:
    if isinstance(operand, Scalar):
        return f"{operand.value:g}"
    if isinstance(operand, Slot):
        return _ROLES.get(roles[operand.index], roles[operand.index])
    return f"value {operand.index}"


CLASSES = {
    cls.__name__: cls
    for cls in (Value, Slot, Scalar, Convolution, Windows, Pointwise, Normalize, Reduce, Pool, Softmax, Cast, Chain)
}
