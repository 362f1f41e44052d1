"""Several steps that together are one word: x · sigmoid(x) is silu, x · tanh(softplus(x)) is mish."""

from __future__ import annotations

import dataclasses

from postlude.chain import Chain, Operand, Pointwise, Step, Value, with_operands
from postlude.words import POINTWISE

# word: the words applied to x one after the other, all with default settings, before the product with x.
IDIOMS: dict[str, tuple[str, ...]] = {"silu": ("sigmoid",), "mish": ("softplus", "tanh")}


def with_idioms(chain: Chain) -> Chain:
    """The same chain with idioms replaced by single words, which take at most a third of the instructions."""
    for number, step in enumerate(chain.steps, 1):
        for word, spelled in IDIOMS.items():
            start = number - len(spelled) - 1
            if start >= 0 and _is_spelled(chain, step, start, number, spelled):
                return with_idioms(_shortened(chain, start, number, word))
    return chain


def _is_spelled(chain: Chain, step: Step, start: int, number: int, spelled: tuple[str, ...]) -> bool:
    """Whether steps `start` + 1 to `number` − 1 are these words, `step` is the product, and nothing else reads them."""
    before = chain.steps[start : number - 1]
    return (
        isinstance(step, Pointwise)
        and step.op == "mul"
        and set(step.operands) == {Value(start), Value(number - 1)}
        and all(_is_usual(one, word, place) for place, (one, word) in enumerate(zip(before, spelled), start))
        and all(chain.last_uses.get(value) == value + 1 for value in range(start + 1, number))
    )


def _is_usual(step: Step, word: str, place: int) -> bool:
    if not isinstance(step, Pointwise) or step.op != word or step.operands != (Value(place),):
        return False
    row = POINTWISE[word]
    return tuple(value for _, value in step.settings) == row.usual


def _shortened(chain: Chain, start: int, number: int, word: str) -> Chain:
    gone = number - start - 1

    def moved(operand: Operand) -> Operand:
        return Value(operand.index - gone) if isinstance(operand, Value) and operand.index >= number else operand

    after = [with_operands(step, moved) for step in chain.steps[number:]]
    steps = (*chain.steps[:start], Pointwise(word, (Value(start),)), *after)
    return dataclasses.replace(chain, steps=steps)
