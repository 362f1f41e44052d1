"""Several problems together: one row for each, and fast_p over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from postlude.report import model

SPEEDS = (1.0, 1.5, 2.0)
BASES = (model.EAGER, model.COMPILE)


@dataclass(frozen=True)
class Row:
    title: str
    shape: str
    outcome: str
    seconds: dict[str, float]  # variant → median
    ratios: dict[str, model.Interval]  # base → how many times as fast the subject is
    note: str = ""


@dataclass(frozen=True)
class Summary:
    rows: tuple[Row, ...]
    fast: dict[str, dict[float, float | None]]  # base → p → share; None where that base was never timed
    total: int


def row_of(report: model.Report) -> Row:
    race = report.main_race
    entry = report.entry(race, report.subject)
    ratios = {}
    if entry is not None:
        pairs = ((model.EAGER, entry.times_eager), (model.COMPILE, entry.times_compile))
        ratios = {base: ratio for base, ratio in pairs if ratio is not None}
    seconds = {} if race is None else {one.variant: one.seconds.median for one in race.entries}
    note = next(iter((*report.judgement.reasons, *report.findings)), "")
    return Row(report.title, report.shape, report.judgement.outcome, seconds, ratios, note)


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
