"""Results of the repository's benchmarks that travel with the package."""

from __future__ import annotations

from pathlib import Path

import postlude
from postlude.check import records
from postlude.check.records import Record

_PACKAGE = Path(postlude.__file__).parent
# A wheel brings the file along (pyproject.toml); in a checkout it lies with the benchmarks.
_PLACES = (_PACKAGE / "recorded" / "h200.csv", _PACKAGE.parents[1] / "benchmarks" / "results" / "h200.csv")
H200 = next((path for path in _PLACES if path.exists()), _PLACES[0])


def rows_of(chain: str, precision: str, mode: str = "forward") -> dict[str, Record]:
    """Variant → row of one chain on the H200; empty where the results are not at hand."""
    if not H200.exists():
        return {}
    wanted = (chain, precision, mode, "contiguous")
    found = [row for row in records.read(H200) if (row.chain, row.precision, row.mode, row.layout) == wanted]
    return {row.variant: row for row in found}
