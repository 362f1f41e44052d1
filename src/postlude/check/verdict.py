"""What checking returns: errors, the judgement of one quantity, the verdict on a whole result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["right", "wrong", "cannot tell"]


@dataclass(frozen=True)
class Errors:
    rms: float
    worst: float

    def times(self, factor: float) -> Errors:
        return Errors(self.rms * factor, self.worst * factor)

    def as_dict(self) -> dict[str, Any]:
        return {"rms": _number(self.rms), "worst": _number(self.worst)}


NONE = Errors(0.0, 0.0)


@dataclass(frozen=True)
class Judged:
    """One quantity (the output, a gradient, a buffer) over one pool of points; errors are relative."""

    name: str
    outcome: Outcome
    reasons: tuple[str, ...] = ()
    errors: Errors | None = None
    budget: Errors | None = None
    own: Errors | None = None  # PyTorch's error
    mode: Errors | None = None  # the error of the precision mode itself
    points: int = 0
    refused: int = 0
    passing_nulls: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("errors", "budget", "own", "mode")}
        return {
            "name": self.name,
            "outcome": self.outcome,
            "reasons": list(self.reasons),
            **{name: None if value is None else value.as_dict() for name, value in numbers.items()},
            "points": self.points,
            "refused": self.refused,
            "passing_nulls": list(self.passing_nulls),
        }


@dataclass(frozen=True)
class Verdict:
    """The verdict on a result; `reasons` says why it is not right."""

    outcome: Outcome
    reasons: tuple[str, ...] = ()
    precision: str = ""
    quantities: tuple[Judged, ...] = ()
    notes: tuple[str, ...] = ()  # observations that do not affect the verdict, and what was left out

    @property
    def right(self) -> bool:
        return self.outcome == "right"

    @property
    def errors(self) -> Errors | None:
        """The errors of the first quantity, the output."""
        return self.quantities[0].errors if self.quantities else None

    @property
    def budget(self) -> Errors | None:
        return self.quantities[0].budget if self.quantities else None

    def as_dict(self) -> dict[str, Any]:
        """The numbers for JSON; infinities and NaN are text."""
        return {
            "outcome": self.outcome,
            "reasons": list(self.reasons),
            "precision": self.precision,
            "errors": None if self.errors is None else self.errors.as_dict(),
            "budget": None if self.budget is None else self.budget.as_dict(),
            "quantities": [judged.as_dict() for judged in self.quantities],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        if self.reasons:
            more = f" (and {len(self.reasons) - 1} more)" if len(self.reasons) > 1 else ""
            return f"{self.outcome}: {self.reasons[0]}{more}"
        if self.errors is None or self.budget is None:
            return self.outcome
        ours, allowed = self.errors, self.budget
        return (
            f"{self.outcome} in {self.precision}: error {ours.rms:.1e} rms, {ours.worst:.1e} worst, "
            f"budget {allowed.rms:.1e} and {allowed.worst:.1e}, {self.quantities[0].points} points"
        )


def conclude(
    precision: str, findings: Sequence[str], required: Sequence[Judged], extra: Sequence[Judged] = ()
) -> Verdict:
    """The verdict on the whole: wrong if there is a finding or a wrong quantity; the required quantities must be
    telling."""
    quantities = (*required, *extra)
    wrong = [reason for judged in quantities if judged.outcome == "wrong" for reason in judged.reasons]
    faults = [*findings, *wrong]
    if faults:
        return Verdict("wrong", tuple(dict.fromkeys(faults)), precision, quantities)
    doubts = [reason for judged in required if judged.outcome == "cannot tell" for reason in judged.reasons]
    if doubts or not required:
        return Verdict("cannot tell", tuple(doubts) or ("nothing was compared",), precision, quantities)
    return Verdict("right", (), precision, quantities)


def combine(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The verdict on several parts together, or None; the part nearest its limit comes first."""
    parts = sorted(verdicts, key=_nearness, reverse=True)
    if not parts:
        return None
    outcomes = {part.outcome for part in parts}
    outcome: Outcome = "wrong" if "wrong" in outcomes else "cannot tell" if "cannot tell" in outcomes else "right"
    reasons = dict.fromkeys(reason for part in parts if part.outcome == outcome for reason in part.reasons)
    precision = ", ".join(sorted({part.precision for part in parts}))
    return Verdict(outcome, tuple(reasons), precision, tuple(q for part in parts for q in part.quantities))


def _nearness(verdict: Verdict) -> float:
    if verdict.errors is None or verdict.budget is None or not verdict.budget.rms > 0:
        return 0.0
    return verdict.errors.rms / verdict.budget.rms


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
