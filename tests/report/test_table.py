"""The CSV holds the JSON's numbers, one a row, and nothing that a spreadsheet would run."""

from __future__ import annotations

import csv
import dataclasses
import io

from postlude.report import model
from postlude.report.table import COLUMNS, to_csv
from report.sample import FULL


def _rows(*reports: model.Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(reports))))


def test_numbers_are_the_reports_to_the_last_digit() -> None:
    rows = _rows(FULL)
    assert tuple(rows[0]) == COLUMNS
    found = {(r["section"], r["part"], r["name"], r["quantity"]): r for r in rows}
    for race in FULL.races:
        for entry in race.entries:
            row = found["time", race.name, entry.variant, "time"]
            assert [float(row[c]) for c in ("value", "low", "high")] == [
                entry.seconds.median,
                entry.seconds.low,
                entry.seconds.high,
            ]
    assert FULL.roofline is not None
    assert float(found["roofline", "", "postlude", "share of the roof"]["value"]) == FULL.roofline.points[1].share
    assert found["verdict", "", "postlude", "outcome"]["value"] == "right"
    assert found["chain", "conv", "after", "launches"]["value"] == "6"
    assert {r["section"] for r in rows} >= {"memory", "error", "declined", "environment", "finding", "question"}


def test_several_reports_are_told_apart() -> None:
    assert {row["report"] for row in _rows(FULL, dataclasses.replace(FULL, title="other"))} == {FULL.title, "other"}


def test_formulas_are_kept_from_spreadsheets() -> None:
    rows = _rows(dataclasses.replace(FULL, title="=HYPERLINK(1)"))
    assert {row["report"] for row in rows} == {"'=HYPERLINK(1)"}
