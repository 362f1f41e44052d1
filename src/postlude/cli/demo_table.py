"""The demo's table: 80 columns, this machine and the recorded GPU one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from postlude.check.clock import Estimate, ratio
from postlude.check.records import Record
from postlude.check.verdict import Errors
from postlude.cli.output import say
from postlude.cli.recorded import rows_of
from postlude.report import gather, words
from postlude.report.model import COMPILE, EAGER, POSTLUDE

if TYPE_CHECKING:
    from postlude.cli.demo import Shown

WIDTH = 80
WIDTHS = (8, 9, 10, 21, 10)  # a blank before “11.19× (10.56–13.36)” too
HEADS = ("eager", "compile", "postlude", "× eager", "× compile")


def show(shown: Sequence[Shown], here: str) -> None:
    say(_line("milliseconds", HEADS), "bold")
    say("─" * WIDTH)
    for one in shown:
        say(one.name, "bold")
        for line in _lines(one, here):
            say(line)


def _lines(one: Shown, here: str) -> list[str]:
    lines = []
    for malloc, timings in sorted(one.timings.items()):
        eager, compiled, ours = (timings.get(name) for name in (EAGER, COMPILE, POSTLUDE))
        speeds = [_ratio_cell(base, ours) if one.is_right else "–" for base in (eager, compiled)]
        label = f"  {here}, {malloc}" if len(one.timings) > 1 else f"  {here}"
        speeds[1] = speeds[1].split(" ")[0]
        lines.append(_line(label, (_time_cell(eager), _time_cell(compiled), _time_cell(ours), *speeds)))
    recorded = rows_of(*one.case.recorded)
    if {EAGER, POSTLUDE} <= recorded.keys():
        lines.append(_line("  H200, recorded", _recorded_cells(recorded)))
    return [*lines, *(f"    {text}" for text in _remarks(one, recorded))]


def _line(label: str, cells: Sequence[str]) -> str:
    figures = "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS))
    return f"{label:<{WIDTH - len(figures)}}{figures}"


def _recorded_cells(rows: dict[str, Record]) -> list[str]:
    compiled = min((row.ms_p50 for name, row in rows.items() if name.startswith(COMPILE) and row.ms_p50), default=None)
    eager, ours = (rows[name].ms_p50 or 0.0 for name in (EAGER, POSTLUDE))
    fused = rows[POSTLUDE]
    gain = f"{words.times(fused.speedup or 0)} ({fused.speedup_low:.2f}–{fused.speedup_high:.2f})"
    cells = ["–" if ms is None else words.milliseconds(ms / 1e3) for ms in (eager, compiled, ours)]
    return [*cells, gain, "–" if compiled is None else words.times(compiled / ours)]


def _remarks(one: Shown, recorded: dict[str, Record]) -> list[str]:
    sizes = f"{one.shape} here"
    if recorded:
        sizes += f", {one.case.recorded[2]} on the H200"
    sizes += f" ({one.case.note})" if recorded and one.case.note else ""
    return [sizes, _errors(one)]


def _errors(one: Shown) -> str:
    verdict = one.result.verdict
    if verdict is None:
        return "nothing was fused here"
    if not verdict.right:
        return f"{verdict.outcome}: no speed-up is shown"
    first = verdict.quantities[0] if verdict.quantities else None
    pair: tuple[Errors | None, Errors | None] = (None, None) if first is None else (first.errors, first.own)
    ours, theirs = ("–" if errors is None else f"{errors.rms:.1e}" for errors in pair)
    return f"right: error {ours}, PyTorch's {theirs}"


def date_of(shown: Sequence[Shown]) -> str:
    """When the recorded rows were measured, and at which commits."""
    rows = [rows[POSTLUDE] for one in shown if POSTLUDE in (rows := rows_of(*one.case.recorded))]
    days, commits = ({getattr(row, name)[:10] for row in rows} for name in ("timestamp", "commit"))
    return f"{' to '.join(sorted(days))} at commit {', '.join(sorted(commits))}" if rows else ""


def _time_cell(timing: Estimate | None) -> str:
    return "–" if timing is None else words.milliseconds(timing.median)


def _ratio_cell(base: Estimate | None, timing: Estimate | None) -> str:
    if base is None or timing is None:
        return "–"
    return words.times_in_range(gather.interval_of(ratio(base, timing)))
