"""What `postlude bench` prints, and its rows for a record file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from postlude import hardware
from postlude.check import records
from postlude.check.clock import Estimate
from postlude.cli.bench_state import Bench
from postlude.cli.frame import Settings
from postlude.cli.measure import footprint_of
from postlude.cli.output import say, show_table
from postlude.cli.session import Opened
from postlude.plan.problem import spec_of
from postlude.report import gather, model, words

COLUMNS = ["variant", "ms", "interval", "× eager", "× compile", ""]


def show(report: model.Report) -> None:
    """The verdict first, then the times, then what a reader should know about them."""
    say(words.headline(report), "bold")
    for race in report.races:
        say(race.name.capitalize(), "bold")
        show_table(COLUMNS, [_cells(report, race, entry) for entry in race.entries], numbers=COLUMNS[1:-1])
    say(f"{words.rounds(report.races[0])}.")
    _show_comparisons(report)
    for title, sentences in (
        ("Finding", report.findings),
        ("Question", report.questions),
        ("Left out", report.left_out),
    ):
        for sentence in sentences:
            say(f"{title}: {sentence}.".replace("?.", "?"))
    if model.CANDIDATE in {variant.name for variant in report.variants}:
        _show_candidate(report)


def _show_comparisons(report: model.Report) -> None:
    race = report.main_race
    for name in (model.POSTLUDE, model.CANDIDATE):
        entry = report.entry(race, name)
        for found, other in () if entry is None else _ratios(entry):
            say(words.comparison(found, name.capitalize(), other))
    roof = report.roofline
    if roof is not None:
        shares = "; ".join(f"{point.variant} {words.percent(point.share)}" for point in roof.points)
        say(f"Share of the roofline: {shares}; at it a forward would take {words.milliseconds(roof.floor_seconds)} ms.")


def _ratios(entry: model.Entry) -> Iterator[tuple[model.Interval, str]]:
    for found, other in ((entry.times_eager, "eager PyTorch"), (entry.times_compile, "torch.compile")):
        if found is not None:
            yield found, other


def _show_candidate(report: model.Report) -> None:
    variant = report.variant(model.CANDIDATE)
    if variant.may_be_compared:
        return
    for reason in variant.judgement.reasons if variant.judgement is not None else ():
        say(f"  {reason}")
    timed = report.entry(report.main_race, model.CANDIDATE) is not None
    say(f"The candidate failed verification: {'its speed-up is not shown' if timed else 'it was not timed'}.", "bold")


def _cells(report: model.Report, race: model.Race, entry: model.Entry) -> list[str]:
    ratios = [
        "–" if found is None else words.times_in_range(found) for found in (entry.times_eager, entry.times_compile)
    ]
    note = report.variant(entry.variant).note if race is report.main_race else ""
    return [
        entry.variant,
        words.milliseconds(entry.seconds.median),
        words.time_range(entry.seconds),
        *ratios,
        note,
    ]


def variants(one: Bench) -> Iterator[model.Variant]:
    """Every variant that took part or failed to."""
    for runner in one.runners:
        verdict = one.verdicts.get(runner.name)
        found = footprint_of(runner, one.settings.device, one.options.train)
        yield model.Variant(
            runner.name,
            one.notes.get(runner.name, ""),
            None if verdict is None else gather.judgement_of(verdict),
            verdict is not None,
            found.peak,
            found.saved,
            found.launches,
        )
    if model.CANDIDATE in one.verdicts:
        verdict = one.verdicts[model.CANDIDATE]
        yield model.Variant(model.CANDIDATE, one.notes[model.CANDIDATE], gather.judgement_of(verdict), True)


def rows(report: model.Report, opened: Opened, settings: Settings) -> list[records.Record]:
    x = spec_of(next(item for item in opened.inputs if isinstance(item, Tensor)))
    common: dict[str, Any] = {
        "chain": " + ".join(site.chain for site in report.sites) or report.title.removesuffix(".py"),
        "shape": "×".join(map(str, x.shape)),
        "dtype": x.dtype,
        "layout": x.layout,
        "precision": settings.precision,
        "threads": hardware.machine_for(settings.device).threads,
        **records.environment(settings.device),
    }
    return [_row(common, report, race, entry) for race in report.races for entry in race.entries]


def _row(common: dict[str, Any], report: model.Report, race: model.Race, entry: model.Entry) -> records.Record:
    variant, timing = report.variant(entry.variant), Estimate.of(entry.seconds.samples)
    columns: dict[str, Any] = {f"ms_p{p}": 1e3 * timing.quantile(p / 100) for p in (20, 50, 80)}
    columns |= {"ms_low": 1e3 * timing.low, "ms_high": 1e3 * timing.high}
    if entry.times_eager is not None:
        found = entry.times_eager
        columns |= {"speedup": found.median, "speedup_low": found.low, "speedup_high": found.high}
    quantities = () if variant.judgement is None else variant.judgement.quantities
    if quantities and quantities[0].errors is not None:
        columns |= {"error_rms": quantities[0].errors.rms, "error_worst": quantities[0].errors.worst}
    if variant.peak_bytes is not None and race.direction == "forward":
        columns |= {"peak_mib": variant.peak_bytes / 2**20, "launches": variant.launches}
    mode = race.direction if race.cache == "warm" else f"{race.direction}, {race.cache}"
    return records.Record(**common, mode=mode, variant=entry.variant, **columns)
