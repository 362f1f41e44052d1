"""Writes a report to a file and reads it back; the file's suffix chooses the format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from postlude.errors import PostludeError
from postlude.files import write_whole
from postlude.report.decode import decode
from postlude.report.model import SCHEMA, Report, as_dict
from postlude.report.table import to_csv

FORMS = (".html", ".json", ".csv")


def check_form(path: Path) -> None:
    """Raises, with one sentence, if the suffix is not one of a report's."""
    if path.suffix.lower() not in FORMS:
        raise PostludeError(f"{path}: a report is written as {', '.join(FORMS[:-1])} or {FORMS[-1]}.")


def write(path: str | Path, reports: Report | Sequence[Report], title: str = "") -> Path:
    """Writes one report, or several on one page, completely or not at all."""
    path = Path(path)
    check_form(path)
    write_whole(path, _text(path, [reports] if isinstance(reports, Report) else list(reports), title))
    return path


def _text(path: Path, reports: list[Report], title: str) -> str:
    form = path.suffix.lower()
    if form == ".csv":
        return to_csv(reports)
    if form == ".json":
        return json.dumps(to_json(reports), indent=1, ensure_ascii=False) + "\n"
    from postlude.report.html import render  # jinja2 is loaded only when a page is wanted

    return render(reports, title)


def to_json(reports: Sequence[Report]) -> dict[str, object]:
    return {"schema": SCHEMA, "reports": [as_dict(report) for report in reports]}


def read(path: str | Path) -> list[Report]:
    """The reports of a JSON file that `write` or `postlude bench --json` wrote."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PostludeError(f"{path}: there is no such file.") from None
    except (OSError, ValueError) as error:
        raise PostludeError(f"{path}: it cannot be read as JSON ({error}).") from error
    listed = data.get("reports") if isinstance(data, dict) else None
    if not isinstance(listed, list) or not listed:
        raise PostludeError(f"{path}: it holds no report; `postlude bench FILE.py --json {path.name}` writes one.")
    try:
        return [decode(one) for one in listed]
    except ValueError as error:
        raise PostludeError(f"{path}: it is no report that this version can read ({error}).") from error
