"""How numbers are written, and the sentences that a report opens with; the command line uses the same."""

from __future__ import annotations

import math

from postlude.report import model

VERDICTS = {
    model.RIGHT: "Right",
    model.WRONG: "Wrong",
    model.CANNOT_TELL: "Cannot tell",
    model.NOT_CHECKED: "Not checked",
    model.DECLINED: "Declined",
    model.FAILED: "Failed",
}


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def time_range(interval: model.Interval) -> str:
    return "–" if is_single(interval) else f"{milliseconds(interval.low)}–{milliseconds(interval.high)}"


def times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def ratio_range(interval: model.Interval) -> str:
    if is_single(interval):
        return "one round" if interval.samples else ""
    return f"{interval.low:.2f}–{interval.high:.2f}"


def times_in_range(interval: model.Interval) -> str:
    """The ratio with its interval, if it has one."""
    median, around = times(interval.median), ratio_range(interval)
    return f"{median} ({around})" if around else median


def is_single(interval: model.Interval) -> bool:
    """Whether this is one sample, which says nothing about how far off it is."""
    return interval.low == interval.high


def rounds(race: model.Race) -> str:
    """The rounds behind a race's numbers, as the start of a sentence."""
    if race.rounds == 1:
        return "Times of one round, which have no interval"
    coverage = race.entries[0].seconds.coverage if race.entries else 0.0
    held = f"; the intervals hold them with {percent(coverage)} confidence" if coverage else ""
    return f"Medians{f' of {race.rounds} rounds' if race.rounds else ''}{held}"


def error(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else str(value)


def size(count: float) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= least:
            return f"{count / least:.3g} {unit}"
    return f"{count:.0f} B"


def rate(count: float, unit: str) -> str:
    for letter, least in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= least:
            return f"{count / least:.3g} {letter}{unit}"
    return f"{count:.3g} {unit}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def counted(count: int, plural: str) -> str:
    singular = {"passes": "pass", "launches": "launch"}.get(plural, plural.removesuffix("s"))
    return f"{count} {singular if count == 1 else plural}"


def headline(report: model.Report) -> str:
    """One sentence with the verdict and, if it may be shown, the speed."""
    start = VERDICTS[report.judgement.outcome]
    if report.judgement.precision:
        start += f" in {report.judgement.precision}"
    if report.judgement.reasons:
        start += f": {report.judgement.reasons[0].rstrip('.')}"
    race = report.main_race
    entry = report.entry(race, report.subject)
    if entry is None or race is None:
        return start + "."
    if not report.variant(report.subject).may_be_compared:
        return start + ". No speed-up is shown for what is not right."
    parts = [
        f"{times(found.median)} {name}{f' ({around})' if (around := ratio_range(found)) else ''}"
        for found, name in ((entry.times_eager, "eager"), (entry.times_compile, "torch.compile"))
        if found is not None
    ]
    joined = " and ".join(parts)
    return f"{start}. {report.subject.capitalize()} runs at {joined}: {race.name}." if parts else start + "."


def comparison(found: model.Interval, name: str, other: str) -> str:
    """How `name` compares with `other`, in words that do not flatter it."""
    if is_single(found):
        return f"{name} ran at {times(found.median)} {other} in the only round."
    if found.low > 1:
        return f"{name} is {times(found.median)} as fast as {other}."
    if found.high < 1:
        return f"{name} is slower than {other} here: {times(found.median)} its speed."
    return f"{name} and {other} are not clearly apart here ({ratio_range(found)}×)."
