"""Tables of tiles as values, and the user's own as files: what `postlude tune` measured, for one card and software.

A table is a list of rows; the first row whose use covers another's serves it. Every writer makes a new file, completely
or not at all, and deletes the files whose rows it took over; readers merge all files. So no process waits for another,
and nothing is lost if two write at the same time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from postlude.files import write_whole

FORMAT = 1  # changes when the meaning of a setting changes
# The kinds of pass, their settings, and the values that a user's table may have.
SETTINGS: dict[str, dict[str, tuple[int, ...]]] = {
    "product": {"rows": (64, 128, 256), "stages": (2, 3, 4), "warps": (4, 8)},
    "product by residue": {"rows": (64, 128, 256), "stages": (2, 3, 4), "warps": (4, 8)},
    "product by phase": {"rows": (64, 128, 256), "stages": (2, 3, 4), "warps": (4, 8)},
    "product in place": {"columns": (64, 128, 256), "steps": (16, 32, 64), "stages": (2, 3, 4)},
    "input's gradient": {"rows": (64, 128, 256), "width": (1, 2, 4), "stages": (2, 3, 4), "warps": (4, 8)},
    "input's gradient by residue": {"rows": (64, 128, 256), "stages": (2, 3, 4), "warps": (4, 8)},
    "input's gradient in place": {"columns": (128, 256), "steps": (32, 64), "stages": (2, 3, 4), "warps": (4, 8)},
    "weight's gradient": {"stages": (2, 3, 4, 5), "warps": (4, 8), "programs": (1, 2, 4)},
    "moments pass": {"elements": (512, 1024, 2048, 4096, 8192), "programs": (2, 4, 8, 16)},
    "last pass": {"elements": (512, 1024, 2048, 4096, 8192, 16384)},
    "few channels": {"depth": (4, 6, 8, 11, 16), "height": (4, 6, 8, 10, 12), "blocks": (1, 2)},
    "few channels' gradients": {"height": (4, 6, 8, 12, 16)},
}
NAME = re.compile(r"\.?tiles-(?P<key>[0-9a-f]{16})-[0-9a-f]{8}\.json(\.\w+)?")  # also what an interrupted write leaves
_ATTEMPTS = 3  # to read a folder in which other processes create and delete files


@dataclass(frozen=True)
class TileUse:
    """What a tile is needed for. In a row, an empty string or 0 matches anything."""

    kind: str
    architecture: str = ""
    arithmetic: str = ""  # "1 plane" or "2 planes" for a GEMM, the value's dtype for a pass
    channels: tuple[int, int] = (0, 0)  # in and out, rounded up to powers of two
    layout: str = ""

    def is_covered_by(self, other: TileUse) -> bool:
        return all(a == b or not b for a, b in zip(self._parts, other._parts))

    @property
    def _parts(self) -> tuple[str | int, ...]:
        # Not dataclasses.astuple, which copies every value: this took nine tenths of the time to plan a chain.
        return self.kind, self.architecture, self.arithmetic, *self.channels, self.layout

    def __str__(self) -> str:
        ways = f"{self.channels[0]}→{self.channels[1]}" if self.channels[0] else str(self.channels[1])
        words = (self.arithmetic, f"{ways} channels", self.layout.replace("_", "-"))
        return f"{self.kind} ({', '.join(word for word in words if word)})"


@dataclass(frozen=True)
class Row:
    use: TileUse
    settings: tuple[tuple[str, int], ...]
    origin: str = ""  # of a shipped row: where it comes from
    tuned: str = ""  # of a user's row: when it was measured, in ISO 8601

    @property
    def values(self) -> dict[str, int]:
        return dict(self.settings)

    def __str__(self) -> str:
        return f"tuned on this card on {self.tuned[:10]}" if self.tuned else self.origin


@dataclass(frozen=True)
class TileTable:
    rows: tuple[Row, ...] = ()

    def find(self, use: TileUse) -> Row | None:
        return next((row for row in self.rows if use.is_covered_by(row.use)), None)

    def joined(self, other: TileTable) -> TileTable:
        """The rows of both tables; if both have a row for the same use, the newer one."""
        found: dict[TileUse, Row] = {}
        for row in sorted((*self.rows, *other.rows), key=lambda row: row.tuned):
            found[row.use] = row
        return TileTable(tuple(found.values()))


NO_TILES = TileTable()


@dataclass(frozen=True)
class Key:
    """What a measured tile depends on."""

    card: str
    torch: str
    triton: str
    kernels: str  # a hash of our kernels

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((FORMAT, *dataclasses.astuple(self))).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Found:
    """What was found in a folder for a key."""

    table: TileTable
    files: tuple[Path, ...]  # that were read
    damaged: tuple[Path, ...]
    foreign: int  # files for other keys

    @property
    def problem(self) -> str | None:
        """What is wrong with the folder, as the end of a sentence, or None."""
        if self.damaged:
            return f"{len(self.damaged)} of them cannot be read" if self.files else "they cannot be read"
        if self.foreign and not self.files:
            return "they were measured on another card, or with another torch, Triton or Postlude"
        return None


def read_tables(folder: Path, key: Key) -> Found:
    for _ in range(_ATTEMPTS):
        found = _read_once(folder, key)
        if found is not None:
            return found
    return Found(TileTable(), (), (), 0)


def _read_once(folder: Path, key: Key) -> Found | None:
    """The folder's tables; None if a file was deleted meanwhile, because its rows are then in a newer one."""
    table, files, damaged, foreign = TileTable(), [], [], 0
    for path in sorted(folder.glob("tiles-*.json")):
        match = NAME.fullmatch(path.name)
        if match is None or match["key"] != key.digest:
            foreign += match is not None
            continue
        try:
            table = table.joined(loads(path.read_text("utf-8"), key))
            files.append(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            damaged.append(path)
    return Found(table, tuple(files), tuple(damaged), foreign)


def write_table(folder: Path, key: Key, table: TileTable) -> Path:
    """Adds rows to those in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    before = read_tables(folder, key)
    path = folder / f"tiles-{key.digest}-{secrets.token_hex(4)}.json"
    write_whole(path, dumps(before.table.joined(table), key))
    for old in (*before.files, *before.damaged):
        old.unlink(missing_ok=True)
    return path


def dumps(table: TileTable, key: Key) -> str:
    rows = [
        {**dataclasses.asdict(row.use), "settings": row.values, "tuned": row.tuned}
        for row in sorted(table.rows, key=lambda row: str(row.use))
    ]
    return json.dumps({"format": FORMAT, **dataclasses.asdict(key), "rows": rows}, indent=1, ensure_ascii=False) + "\n"


def loads(text: str, key: Key) -> TileTable:
    """Reads a table; raises ValueError for a text that `dumps` would not have written for this key."""
    try:
        data = json.loads(text)
        if data["format"] != FORMAT or Key(data["card"], data["torch"], data["triton"], data["kernels"]) != key:
            raise ValueError("the table is for something else")
        return TileTable(tuple(_row(item) for item in data["rows"]))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no table: {error!r}") from error


def _row(item: dict[str, Any]) -> Row:
    kind, given = item["kind"], item["settings"]
    known = SETTINGS[kind]
    if given.keys() != known.keys() or any(type(v) is not int or v not in known[name] for name, v in given.items()):
        raise ValueError(f"settings {given} of {kind}")
    words = (kind, item["architecture"], item["arithmetic"], item["layout"], item["tuned"])
    first, second = item["channels"]
    if not all(isinstance(word, str) for word in words) or not all(type(one) is int for one in (first, second)):
        raise ValueError(f"words {words}")
    datetime.fromisoformat(item["tuned"])
    use = TileUse(kind, item["architecture"], item["arithmetic"], (first, second), item["layout"])
    return Row(use, tuple(given.items()), tuned=item["tuned"])
