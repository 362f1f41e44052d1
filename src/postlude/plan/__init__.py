"""From a chain to a plan: what will run for one problem, and why."""

from postlude.plan.lower import lower
from postlude.plan.passes import Keep, KeepMoments, Pass, Store
from postlude.plan.plan import Plan, Refusal
from postlude.plan.problem import CONVOLUTIONS, PRECISIONS, Problem, Settings, Spec, problem_of

__all__ = [
    "CONVOLUTIONS",
    "PRECISIONS",
    "Keep",
    "KeepMoments",
    "Pass",
    "Plan",
    "Problem",
    "Refusal",
    "Settings",
    "Spec",
    "Store",
    "lower",
    "problem_of",
]
