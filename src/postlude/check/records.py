"""Measurements as CSV: one row per problem, machine and variant, with everything a number depends on."""

from __future__ import annotations

import csv
import functools
import io
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from postlude.check.clock import Estimate, ratio
from postlude.code_hash import kernel_hash as kernel_hash
from postlude.files import write_whole
from postlude.hardware import malloc_is_tuned, versions

# Rows that agree in these measure the same thing: the newer one replaces the older.
KEY = ("chain", "shape", "dtype", "layout", "precision", "mode", "variant", "threads", "malloc", "device")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Record:
    """One row; numbers that were not measured are None and stay empty in the file."""

    chain: str
    shape: str
    dtype: str
    layout: str
    precision: str
    mode: str
    variant: str
    ms_p20: float | None = None
    ms_p50: float | None = None
    ms_p80: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    error_rms: float | None = None
    error_worst: float | None = None
    budget_rms: float | None = None
    budget_worst: float | None = None
    peak_mib: float | None = None
    saved_mib: float | None = None  # saved between forward and backward, besides inputs and parameters
    launches: int | None = None  # of our kernels in one call
    clock_mhz: int | None = None  # of the GPU's multiprocessors, while it was busy
    threads: int | None = None
    malloc: str = ""
    device: str = ""
    torch: str = ""
    triton: str = ""
    python: str = ""
    postlude: str = ""
    commit: str = ""
    kernel_hash: str = ""
    timestamp: str = ""
    floor_ms: float | None = None  # what the problem's compulsory bytes and operations take at the card's rates
    verdict: str = ""  # right, wrong, cannot tell, failed
    reason: str = ""  # why there is no time, or why the verdict is not right

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(_text(getattr(self, name)) for name in KEY)


COLUMNS = tuple(field.name for field in fields(Record))
_LATER = 3  # columns that files of earlier versions do not have


def times_of(timing: Estimate, eager: Estimate) -> tuple[float, ...]:
    """The columns from ms_p20 to speedup_high, in their order."""
    gain = ratio(eager, timing)
    quantiles = (1e3 * timing.quantile(part) for part in (0.2, 0.5, 0.8))
    return (*quantiles, 1e3 * timing.low, 1e3 * timing.high, gain.median, gain.low, gain.high)


def environment(device_type: str) -> dict[str, str]:
    """The columns that describe the machine, its software and the moment."""
    found = versions()
    return {
        **{name: found[name] for name in ("torch", "triton", "python", "postlude")},
        "device": found.get("gpu", UNKNOWN) if device_type == "cuda" else found["cpu"],
        "malloc": "tuned" if malloc_is_tuned() else "default",
        "commit": commit(),
        "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def merge(old: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """A new row replaces the old one with the same key; others are appended."""
    rows = {record.key: record for record in old}
    rows.update((record.key, record) for record in new)
    return list(rows.values())


def update(path: Path, records: Iterable[Record]) -> list[Record]:
    """Merges `records` into the file and returns all its rows."""
    rows = merge(read(path) if path.exists() else [], records)
    write(path, rows)
    return rows


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes all rows at once: a reader sees the old file or the new one, never an incomplete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: _text(v) for column, v in asdict(record).items()} for record in records)
    write_whole(path, buffer.getvalue())


def read(path: Path) -> list[Record]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) not in (COLUMNS, COLUMNS[:-_LATER]):
            raise ValueError(f"{path} does not have the columns of a record file")
        return [_record(row) for row in reader]


@functools.cache
def commit() -> str:
    """This code's commit, with a + if files have changed since; "unknown" outside a repository."""
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return UNKNOWN
    head = _git(here.parent, "rev-parse", "--short=10", "HEAD")
    if not head:
        return UNKNOWN
    return head + ("+" if _git(here.parent, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _record(row: Mapping[str, str]) -> Record:
    values: dict[str, Any] = {}
    for field in fields(Record):
        text = row.get(field.name, "")
        if field.type in ("float | None", "int | None"):
            number = float if field.type.startswith("float") else int
            values[field.name] = number(text) if text else None
        else:
            values[field.name] = text
    return Record(**values)


def _text(value: object) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)
