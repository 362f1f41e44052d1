"""The recorded measurement of a chain on a card, as one line of a docstring."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

Measured = Callable[[str, str, str, str], str | None]  # chain, shape, dtype and precision to a sentence


def from_records(path: Path) -> Measured:
    """A look-up by chain, shape, dtype and precision; None if that was not measured."""
    rows = []
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["mode"] == "forward" and row["layout"] == "contiguous"]

    def look_up(chain: str, shape: str, dtype: str, precision: str) -> str | None:
        key = (chain, shape, dtype, precision)
        found = {
            row["variant"]: row for row in rows if (row["chain"], row["shape"], row["dtype"], row["precision"]) == key
        }
        if not {"eager", "postlude"} <= found.keys():
            return None
        times = {name: float(row["ms_p50"]) for name, row in found.items()}
        others = f"eager {times['eager']:.3g}"
        if "torch.compile" in times:
            others += f", torch.compile {times['torch.compile']:.3g}"
        gain = times["eager"] / times["postlude"]
        return f"{times['postlude']:.3g} ms inside Postlude ({others}: {gain:.1f}×), {found['postlude']['device']}"

    return look_up
