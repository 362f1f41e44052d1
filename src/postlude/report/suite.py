"""Several problems together: one row for each, and fast_p over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from postlude.report import model

SPEEDS = (1.0, 1.5, 2.0)
BASES = (model.EAGER, model.COMPILE)
STEP = "training step"


@dataclass(frozen=True)
class Row:
    title: str
    shape: str
    outcome: str
    seconds: dict[str, float]  # variant → median
    ratios: dict[str, model.Interval]  # base → how many times as fast the subject is
    note: str = ""
    steps: dict[str, float] = field(default_factory=dict)  # the same of a training step, where one was timed
    step_ratios: dict[str, model.Interval] = field(default_factory=dict)
    error: float | None = None  # RMS from float64 by the spread, of the quantity that is furthest off
    own_error: float | None = None  # PyTorch's there
    share: float | None = None  # of the roofline


@dataclass(frozen=True)
class Summary:
    rows: tuple[Row, ...]
    fast: dict[str, dict[float, float | None]]  # base → p → share; None where that base was never timed
    total: int


def row_of(report: model.Report) -> Row:
    race = report.main_race
    step = next((one for one in report.races if one.direction == STEP and one is not race), None)
    note = next(iter((*report.judgement.reasons, *report.findings)), "")
    judged = [one for one in report.judgement.quantities if one.errors is not None and one.own is not None]
    worst = max(judged, key=lambda one: one.errors.rms if one.errors else 0.0, default=None)
    points = () if report.roofline is None else report.roofline.points
    return Row(
        report.title,
        report.shape,
        report.judgement.outcome,
        _seconds(race),
        _ratios(report, race),
        note,
        _seconds(step),
        _ratios(report, step),
        None if worst is None or worst.errors is None else worst.errors.rms,
        None if worst is None or worst.own is None else worst.own.rms,
        next((point.share for point in points if point.variant == report.subject), None),
    )


def _seconds(race: model.Race | None) -> dict[str, float]:
    return {} if race is None else {one.variant: one.seconds.median for one in race.entries}


def _ratios(report: model.Report, race: model.Race | None) -> dict[str, model.Interval]:
    entry = None if race is None else report.entry(race, report.subject)
    if entry is None:
        return {}
    pairs = ((model.EAGER, entry.times_eager), (model.COMPILE, entry.times_compile))
    return {base: ratio for base, ratio in pairs if ratio is not None}


def geometric_mean(rows: Sequence[Row], base: str, *, of_steps: bool = False) -> float | None:
    """Of the ratios that may be shown; None where there are none."""
    ratios = [row.step_ratios if of_steps else row.ratios for row in rows]
    known = [each[base].median for each in ratios if base in each]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def fast(rows: Sequence[Row], base: str, speed: float) -> float | None:
    """The share of all problems that are right and more than `speed` times as fast as `base`, after KernelBench.

    A problem without a ratio counts as not fast, so failures are included. A problem in which nothing was fused counts
    as equally fast, whatever the noise of its timing.
    """
    if not any(base in row.ratios for row in rows):
        return None
    won = [row for row in rows if row.outcome in (model.RIGHT, model.NOT_CHECKED) and base in row.ratios]
    return sum(row.ratios[base].median > speed for row in won) / len(rows)


def summary(reports: Sequence[model.Report]) -> Summary:
    return summary_of([row_of(report) for report in reports])


def summary_of(rows: Sequence[Row]) -> Summary:
    return Summary(tuple(rows), {b: {p: fast(rows, b, p) for p in SPEEDS} for b in BASES}, len(rows))
