"""Checking: the error rule, test points, verification, timing, records. Takes callables, knows no kernels."""

from __future__ import annotations

from postlude.check.budget import Measured, judge
from postlude.check.clock import Estimate, ratio, rotating, time_interleaved
from postlude.check.deviations import Deviation, MismatchError, deviation, scale_of
from postlude.check.modules import verify_modules
from postlude.check.nulls import null_candidates
from postlude.check.points import (
    ChainPoint,
    chain_points,
    inputs_like,
    random_state,
    tensors_for,
    tensors_like,
)
from postlude.check.verdict import Errors, Judged, Verdict, combine
from postlude.check.verify import verify_chain

__all__ = [
    "ChainPoint",
    "Deviation",
    "Errors",
    "Estimate",
    "Judged",
    "Measured",
    "MismatchError",
    "Verdict",
    "chain_points",
    "combine",
    "deviation",
    "inputs_like",
    "judge",
    "null_candidates",
    "random_state",
    "ratio",
    "rotating",
    "scale_of",
    "tensors_for",
    "tensors_like",
    "time_interleaved",
    "verify_chain",
    "verify_modules",
]
