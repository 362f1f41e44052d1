"""A sum or mean computed through its producer: the convolution or linear layer before it is never computed.

A convolution and a linear layer are linear in their input and in their weight. The sum of their result over all
positions, or over all features, is therefore a small product with sums of the input, or of the weight:

    sum over features of (x Wᵀ + b)         =  x · (sum of W's rows) + sum of b
    sum over space of a convolution of x    =  sum over taps of (the sum of the input positions that the tap reads) · W

Affine steps may lie between the two: per channel after a convolution, with one slope for all features after a linear
layer. For 1024×8192 → 8192 this takes 0.3 GFLOP instead of 137.

Infinities give what PyTorch gives. An infinite position of a convolution's input contributes to the same taps as
before. An infinite feature of a linear layer's input gives infinities of both signs, whose sum is NaN, unless all its
weights have one sign; the largest and smallest weight of each input feature tell (stages/through.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from postlude.cards import Card
from postlude.chain import Chain, Convolution, Pointwise, Reduce, Scalar, Slot, Value, values_of
from postlude.plan.problem import Problem, body_dtype
from postlude.plan.worth import pytorch_seconds

AFFINE = ("add", "sub", "rsub", "mul", "div")  # in their first operand
_ADDS = ("sum", "mean", "adaptive_avg_pool")
# Least cost of the producer for which this pays, because a dozen small operators replace it: seconds on a GPU; on a CPU
# operations, which take about 2 ms.
_SECONDS, _OPERATIONS = 100e-6, 100e6


@dataclass(frozen=True)
class Through:
    """A sum through its producer; `reduction` is the number of the step that sums."""

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
    return Through(number) if even_if_slower or _is_large(chain, problem, card) else None


def _is_large(chain: Chain, problem: Problem, card: Card) -> bool:
    if problem.device == "cuda":
        return pytorch_seconds(chain, problem, card) > _SECONDS
    batch, _, *space = problem.x.shape
    return chain.convolution.flops(batch, tuple(space)) > _OPERATIONS


def _adds_up(chain: Chain, number: int) -> bool:
    step = chain.steps[number - 1]
    is_over = isinstance(step, Reduce) and (chain.is_linear or step.over in ("space", "sample"))
    return isinstance(step, Reduce) and is_over and step.op in _ADDS and step.operand == Value(number - 1)


def _meets_runs(conv: Convolution) -> bool:
    """Whether the input positions that a tap reads are consecutive along each axis."""
    return conv.transposed or all(size == 1 for size in conv.stride)


def _is_affine(chain: Chain, number: int) -> bool:
    """Whether a step is affine in each channel, with coefficients that do not depend on the input."""
    step = chain.steps[number - 1]
    if not isinstance(step, Pointwise) or step.op not in AFFINE or step.settings:
        return False
    first, second = step.operands
    if chain.is_linear and step.op in ("mul", "div") and not isinstance(second, Scalar):
        return False
    is_constant = isinstance(second, Scalar) or (
        isinstance(second, Slot) and chain.roles[second.index] in ("channel", "one")
    )
    return first == Value(number - 1) and is_constant
