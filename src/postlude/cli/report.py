"""`postlude report`: results that were written earlier, as a page."""

from __future__ import annotations

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
