"""`postlude report`: results that were written earlier, as a page."""

from __future__ import annotations

import re
from pathlib import Path

from postlude.check import records
from postlude.cli.frame import DONE, Answer
from postlude.cli.output import check_writable, say
from postlude.errors import PostludeError
from postlude.report import Report, read, words, write
from postlude.report.recorded import from_records
from postlude.report.write import check_form, to_json


def report(source: Path, target: Path) -> Answer:
    check_report(target)
    reports = _read(source)
    write(target, reports, title=source.stem if len(reports) > 1 else "")
    for one in reports if len(reports) == 1 else ():
        say(words.headline(one))
    say(f"Wrote {target}.")
    return Answer(DONE, dict(to_json(reports)))


def check_report(path: Path | None) -> None:
    """Raises if the report could not be written: before the work, not after it."""
    if path is not None:
        check_form(path)
        check_writable(path)


def _read(source: Path) -> list[Report]:
    if source.is_dir():
        return _read_folder(source)
    if source.suffix.lower() != ".csv":
        return read(source)
    try:
        reports = from_records(records.read(source))
    except FileNotFoundError:
        raise PostludeError(f"{source}: there is no such file.") from None
    except (OSError, ValueError) as error:
        raise PostludeError(f"{source}: it is not a record file ({error}).") from error
    if not reports:
        raise PostludeError(f"{source}: no row in it is about speed.")
    return reports


def _read_folder(folder: Path) -> list[Report]:
    """The results that `suite` keeps in a folder, a file for each problem."""
    files = sorted(folder.glob("*.json"), key=natural)
    try:
        reports = [one for file in files for one in read(file)]
    except PostludeError:
        reports = []
    if not reports:
        what = "the --json of bench or suite, a .csv of records, or the --results folder of suite"
        raise PostludeError(f"{folder}: this folder is not one of suite's results; pass {what}.")
    return reports


def natural(path: Path) -> list[tuple[int, int | str]]:
    """A key that sorts numbers in names by their value."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]
