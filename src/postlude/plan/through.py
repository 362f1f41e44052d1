"""A sum or mean computed through its producer: the convolution or linear layer before it is never computed.

A convolution and a linear layer are linear in their input and in their weight. The sum of their result over all
positions, or over all features, is therefore a small product with sums of the input, or of the weight:

    sum over features of (x Wᵀ + b)         =  x · (sum of W's rows) + sum of b
    sum over space of a convolution of x    =  sum over taps of (the sum of the input positions that the tap reads) · W

An average pool after a convolution is part of the weight of a smaller one (plan/folding.py). Affine steps may lie
between the two: per channel after a convolution, with one slope for all features after a linear layer. For
1024×8192 → 8192 this takes 0.3 GFLOP instead of 137.

Infinities give what PyTorch gives. An infinite position of a convolution's input contributes to the same taps as
before. An infinite feature of a linear layer's input gives infinities of both signs, whose sum is NaN, unless all its
weights have one sign; the largest and smallest weight of each input feature tell (stages/through.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from postlude.cards import Card
from postlude.chain import (
    Chain,
    Convolution,
    Normalize,
    Pointwise,
    Pool,
    Reduce,
    Scalar,
    Slot,
    Softmax,
    Value,
    values_of,
)
from postlude.plan.folding import Folding, folded_flops, folding_of
from postlude.plan.problem import TF32_CHANNELS, Problem, body_bytes, body_dtype, fp32_mode
from postlude.plan.worth import pytorch_seconds

AFFINE = ("add", "sub", "rsub", "mul", "div")  # in their first operand
_ADDS = ("sum", "mean", "adaptive_avg_pool")
# Least cost of the producer for which this pays, because a dozen small operators replace it: seconds on a GPU; on a CPU
# operations, which take about 2 ms. There PyTorch's operators read a linear layer's weight three times, for its sums
# and its extremes: 8192 → 8192 takes 190 ms so, and the layer 140 ms for 8 samples, 300 for 32, 500 for 64.
_SECONDS, _OPERATIONS, _SAMPLES = 100e-6, 100e6, 64


@dataclass(frozen=True)
class Through:
    """A sum through its producer; `reduction` is the number of the step that sums, or averages windows."""

    reduction: int
    folding: Folding | None = None

    def __str__(self) -> str:
        if self.folding is not None:
            return f"with its pool, by {self.folding.convolution}"
        return "by sums of what it would have multiplied"


def through_for(chain: Chain, problem: Problem, card: Card, even_if_slower: bool = False) -> Through | None:
    conv = chain.producer
    if conv is None or conv.groups != 1 or problem.convolution == "pytorch":
        return None
    number = chain.first((Reduce, Pool))
    if number is None:
        return None
    step = chain.steps[number - 1]
    folding = _folding(chain, step, problem) if isinstance(step, Pool) else None
    if folding is None and (not _adds_up(chain, number) or not _meets_runs(conv)):
        return None
    is_wide = conv.dtype is None and body_dtype(chain, problem) in ("float32", "float64")
    if not is_wide or not all(_is_affine(chain, at) for at in range(1, number)):
        return None
    reads = [value.index for step in chain.steps[number:] for value in values_of(step)]
    if min(reads, default=number) < number:
        return None
    if folding is not None:
        return Through(number, folding) if _is_less(chain, folding, problem, card) else None
    return Through(number) if even_if_slower or _is_large(chain, problem, card) else None


def _folding(chain: Chain, step: Pool, problem: Problem) -> Folding | None:
    """The smaller convolution that a pool leaves, where it is used: on a GPU, in contiguous fp32. With TF32, fewer
    roundings would be averaged than in PyTorch's result."""
    if problem.device != "cuda" or step.operand != Value(chain.steps.index(step)):
        return None
    folding = folding_of(chain.convolution, step, problem.x.shape[2:])
    layouts = {problem.x.layout, problem.tensors[1].layout}
    if folding is None or layouts != {"contiguous"} or problem.hands_on or fp32_mode(chain, problem) != "fp32":
        return None
    if chain.is_linear:  # steps before it would have a slope of their own for each feature
        return folding if chain.steps[0] == step and not problem.multiplies_tf32 else None
    if not _stays_infinite(chain, chain.steps.index(step) + 1):
        return None
    is_few = problem.precision == "auto" and folding.convolution.in_channels < TF32_CHANNELS
    return folding if is_few or not problem.allows_tf32 else None


def _stays_infinite(chain: Chain, number: int) -> bool:
    """Whether the steps after `number` make no infinity finite: where PyTorch has NaN, ours may be infinite there."""
    for step in chain.steps[number:]:
        if isinstance(step, Softmax | Normalize):
            return True  # NaN from here on
        if not isinstance(step, Pointwise) or step.op not in AFFINE:
            return False
    return True


def _is_less(chain: Chain, folding: Folding, problem: Problem, card: Card) -> bool:
    """Whether the folded convolution takes less time than ours, or PyTorch's, with a pass that reads its result."""
    batch, _, *space = problem.x.shape
    flops, rates = chain.convolution.flops(batch, tuple(space)), card.rates
    fused = min(flops / rates.library["fp32"], 3 * flops / rates.product) + 2 * body_bytes(chain, problem) / rates.copy
    sums = problem.tensors[1].bytes if chain.is_linear else 0 if folding.summed is None else 2 * problem.x.bytes
    ours = folded_flops(folding, batch) / rates.library["fp32"] + sums / rates.copy
    return fused > _SECONDS and ours < fused


def _is_large(chain: Chain, problem: Problem, card: Card) -> bool:
    if problem.device == "cuda":
        return pytorch_seconds(chain, problem, card) > _SECONDS
    batch, _, *space = problem.x.shape
    if chain.is_linear and batch < _SAMPLES:
        return False
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
