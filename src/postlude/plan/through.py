"""A sum or mean that goes through its producer: neither the convolution nor its result is ever computed.

A convolution and a linear layer are linear in their input and in their weight. What a sum over all positions, or over
all features, makes of their result is therefore a small product with sums of the input, or of the weight:

    sum over features of (x Wᵀ + b)         =  x · (sum of W's rows) + sum of b
    sum over space of a convolution of x    =  for each tap, the sum of the input's positions that it meets, times W

Steps between the two may be affine in each channel. For 1024×8192 → 8192 that is 0.3 instead of 137 GFLOP.
"""

from __future__ import annotations

from dataclasses import dataclass

from postlude.cards import Card
from postlude.chain import Chain, Convolution, Pointwise, Reduce, Scalar, Slot, Value, values_of
from postlude.plan.problem import Problem, body_dtype
from postlude.plan.worth import pytorch_seconds

AFFINE = ("add", "sub", "rsub", "mul", "div")  # in their first operand
_ADDS = ("sum", "mean", "adaptive_avg_pool")
_SECONDS = 100e-6  # that PyTorch's producer takes at least: a dozen small operators take its place
INFINITIES = "of an infinite input the result is an infinity, where PyTorch's sum of both signs may be NaN"


@dataclass(frozen=True)
class Through:
    """The number of the step that adds up."""

    reduction: int

    def __str__(self) -> str:
        return "by sums of what it would have multiplied"


def through_for(chain: Chain, problem: Problem, card: Card, even_if_slower: bool = False) -> Through | None:
    conv = chain.producer
    if conv is None or conv.groups != 1 or problem.convolution == "pytorch":
        return None
    number = next((number for number, step in enumerate(chain.steps, 1) if isinstance(step, Reduce)), None)
    if number is None or not _adds_up(chain, number) or not _meets_runs(conv):
        return None
    is_wide = conv.dtype is None and body_dtype(chain, problem) in ("float32", "float64")
    if not is_wide or not all(_is_affine(chain, at) for at in range(1, number)):
        return None
    reads = [value.index for step in chain.steps[number:] for value in values_of(step)]
    if min(reads, default=number) < number:
        return None
    return Through(number) if even_if_slower or pytorch_seconds(chain, problem, card) > _SECONDS else None


def _adds_up(chain: Chain, number: int) -> bool:
    step = chain.steps[number - 1]
    is_over = isinstance(step, Reduce) and (chain.is_linear or step.over in ("space", "sample"))
    return isinstance(step, Reduce) and is_over and step.op in _ADDS and step.operand == Value(number - 1)


def _meets_runs(conv: Convolution) -> bool:
    """Whether each tap meets all of the input's positions between two of them."""
    return conv.transposed or all(size == 1 for size in conv.stride)


def _is_affine(chain: Chain, number: int) -> bool:
    """In each channel, with numbers that do not depend on the input."""
    step = chain.steps[number - 1]
    if not isinstance(step, Pointwise) or step.op not in AFFINE or step.settings:
        return False
    first, second = step.operands
    is_constant = isinstance(second, Scalar) or (
        isinstance(second, Slot) and chain.roles[second.index] in ("channel", "one")
    )
    return first == Value(number - 1) and is_constant
