"""Results of the repository's benchmarks that ship with the package."""

from __future__ import annotations

from pathlib import Path

import postlude
from postlude.check import records
from postlude.check.records import Record
from postlude.report.model import COMPILE, EAGER, POSTLUDE

_PACKAGE = Path(postlude.__file__).parent
# A wheel contains the file (pyproject.toml); in a checkout it is with the benchmarks.
_PLACES = (_PACKAGE / "recorded" / "h200.csv", _PACKAGE.parents[1] / "benchmarks" / "results" / "h200.csv")
H200 = next((path for path in _PLACES if path.exists()), _PLACES[0])


def rows_of(chain: str, precision: str, shape: str, dtype: str | None = None) -> dict[str, Record]:
    """Variant → row of one contiguous chain in inference on the H200; empty if the results are not available."""
    if not H200.exists():
        return {}
    wanted = (chain, precision, shape, "forward", "contiguous")
    rows = [r for r in records.read(H200) if (r.chain, r.precision, r.shape, r.mode, r.layout) == wanted]
    return {row.variant: row for row in rows if dtype in (None, row.dtype)}


def measured(chain: str, shape: str, dtype: str, precision: str) -> str | None:
    """The recorded times of a chain, as a line of an exported file's docstring; None if it was not measured."""
    found = rows_of(chain, precision, shape, dtype)
    times = {name: row.ms_p50 for name, row in found.items() if row.ms_p50 is not None}
    if not {EAGER, POSTLUDE} <= times.keys():
        return None
    others = f"{EAGER} {times[EAGER]:.3g}" + (f", {COMPILE} {times[COMPILE]:.3g}" if COMPILE in times else "")
    gain = times[EAGER] / times[POSTLUDE]
    return f"{times[POSTLUDE]:.3g} ms inside Postlude ({others}: {gain:.1f}×), {found[POSTLUDE].device}"
