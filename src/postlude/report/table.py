"""A report as CSV: one number per row, so that a spreadsheet can use any part of it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from postlude.report import model

COLUMNS = ("report", "section", "part", "name", "quantity", "value", "low", "high", "unit")
_Row = tuple[object, ...]


def to_csv(reports: Sequence[model.Report]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for report in reports:
        for row in _rows(report):
            padded = (report.title, *row, *("",) * (len(COLUMNS) - 1 - len(row)))
            writer.writerow([_text(cell) for cell in padded])
    return buffer.getvalue()


def _rows(report: model.Report) -> Iterator[_Row]:
    yield ("verdict", "", report.subject, "outcome", report.judgement.outcome)
    yield ("verdict", "", report.subject, "precision", report.precision)
    for reason in report.judgement.reasons:
        yield ("verdict", "", report.subject, "reason", reason)
    for kind, sentences in (("finding", report.findings), ("question", report.questions)):
        yield from ((kind, "", "", "", sentence) for sentence in sentences)
    for race in report.races:
        for entry in race.entries:
            yield from _entry_rows(race, entry)
    for variant in report.variants:
        yield from _variant_rows(variant)
    yield from _roofline_rows(report)
    for histogram in report.histograms:
        yield ("error histogram", "", histogram.variant, "exact", histogram.exact, "", "", "elements")
        for low, high, count in zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False):
            yield ("error histogram", "", histogram.variant, "log10 of error", count, low, high, "elements")
    for site in report.sites:
        yield from _site_rows(site)
    for item in report.conversions:
        yield ("conversion", item.name, item.shape, item.layout, item.bytes, "", "", "B")
    yield from (("declined", item.name, item.what, "reason", item.reason) for item in report.declined)
    yield from (("left out", "", "", "", sentence) for sentence in report.left_out)
    yield from (("environment", "", name, "", value) for name, value in report.environment.items())
    yield ("environment", "", "made", "", report.made)


def _entry_rows(race: model.Race, entry: model.Entry) -> Iterator[_Row]:
    found = (("time", entry.seconds, "s"), ("times eager", entry.times_eager, "×"))
    for quantity, interval, unit in (*found, ("times torch.compile", entry.times_compile, "×")):
        if interval is not None:
            numbers = (interval.median, interval.low, interval.high)
            yield ("time", race.name, entry.variant, quantity, *numbers, unit)
    if entry.event_seconds is not None:
        yield ("time", race.name, entry.variant, "time by CUDA events", entry.event_seconds, "", "", "s")


def _variant_rows(variant: model.Variant) -> Iterator[_Row]:
    numbers = (("peak memory", variant.peak_bytes), ("saved for backward", variant.saved_bytes))
    yield from (("memory", "", variant.name, what, value, "", "", "B") for what, value in numbers if value is not None)
    if variant.launches is not None:
        yield ("launches", "", variant.name, "launches", variant.launches)
    if variant.note:
        yield ("variant", "", variant.name, "note", variant.note)
    if variant.judgement is not None:
        yield from _quantity_rows(variant.name, variant.judgement)


def _quantity_rows(part: str, judgement: model.Judgement) -> Iterator[_Row]:
    for quantity in judgement.quantities:
        for what in ("errors", "allowed", "own"):
            errors: model.Errors | None = getattr(quantity, what)
            if errors is not None:
                yield ("error", part, quantity.name, f"{what}, rms", errors.rms, "", "", "of the spread")
                yield ("error", part, quantity.name, f"{what}, worst", errors.worst, "", "", "of the spread")


def _roofline_rows(report: model.Report) -> Iterator[_Row]:
    roof = report.roofline
    if roof is None:
        return
    yield ("roofline", "", "", "operations", roof.operations, "", "", "FLOP")
    yield ("roofline", "", "", "compulsory traffic", roof.bytes, "", "", "B")
    yield ("roofline", "", "", "copy speed", roof.bytes_per_second, "", "", "B/s")
    yield ("roofline", "", "", "matrix product speed", roof.operations_per_second, "", "", "FLOP/s")
    yield from (("roofline", "", point.variant, "share of the roof", point.share) for point in roof.points)


def _site_rows(site: model.Site) -> Iterator[_Row]:
    yield ("chain", site.name, "", "chain", site.chain)
    yield ("chain", site.name, "", "fused", site.is_fused)
    sides = (("before", site.before_launches, site.before_bytes), ("after", site.after_launches, site.after_bytes))
    for side, launches, count in sides:
        unit = "operators" if side == "before" else site.unit
        yield from ((("chain", site.name, side, unit, launches),) if launches is not None else ())
        yield from ((("chain", site.name, side, "traffic", count, "", "", "B"),) if count is not None else ())
    for side, seconds in (("before", site.before_seconds), ("after", site.after_seconds)):
        yield from ((("chain", site.name, side, "time", seconds, "", "", "s"),) if seconds is not None else ())
    yield from (("chain", site.name, "", "reason", reason) for reason in site.reasons)
    if site.judgement is not None:
        yield from _quantity_rows(site.name, site.judgement)


def _text(value: object) -> str:
    text = repr(value) if isinstance(value, float) else str(value)
    # A spreadsheet would execute text that begins like a formula, and names come from files of others.
    return f"'{text}" if isinstance(value, str) and text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
