"""Algebra that saves work, by name. Each rule holds for all parameters under its conditions; tests/plan/test_rules.py
has an identity in float64 for each."""

from __future__ import annotations

from postlude.plan.gemm import Gemm
from postlude.plan.passes import KeepMoments
from postlude.plan.plan import Plan
from postlude.plan.through import Through

MEAN = "mean through the norm"
TURNED = "transposed as plain"
PHASES = "by phase"
RESIDUES = "by residue"
AFFINE = "affine gradient"
THROUGH = "sum through the producer"
FOLDED = "pool in the weight"
RULES = {
    MEAN: "steps between a norm and a mean or sum are affine in each sample and channel, so moments are all they need",
    TURNED: "a transposed convolution of stride 1 is a convolution with its taps reversed",
    PHASES: "a transposed convolution with strides is a convolution of stride 1 for each remainder of its outputs",
    RESIDUES: "a convolution with strides is a sum of convolutions of stride 1, one for each remainder of its taps",
    THROUGH: "a convolution or a linear layer is linear, so a sum of its result is a product with sums of its input or "
    "of its weight",
    FOLDED: "a convolution and an average of windows are linear, so both are one convolution with averages of taps",
    AFFINE: "where moments are all that is needed, the gradient at the convolution's result is affine in that result: "
    "the norm's sums need no pass over data",
}


def rules_of(plan: Plan) -> tuple[str, ...]:
    """The names of the rules that a plan uses."""
    found = []
    conv = plan.chain.producer
    if isinstance(plan.own, Through):
        return (THROUGH,) if plan.own.folding is None else (FOLDED,)
    if conv is not None and conv.transposed and plan.own is not None:
        found.append(PHASES if any(size > 1 for size in conv.stride) else TURNED)
    if isinstance(plan.own, Gemm) and plan.own.volume.has_residues:
        found.append(RESIDUES)
    if isinstance(plan.passes[-1].sink, KeepMoments):
        found.append(MEAN)
        if plan.trains and conv is not None:
            found.append(AFFINE)
    return tuple(found)


def rule_lines(plan: Plan) -> tuple[str, ...]:
    """One sentence for each rule that a plan uses."""
    return tuple(f"rule “{name}”: {RULES[name]}" for name in rules_of(plan))
