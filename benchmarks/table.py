"""Writes the README's table of CPU results from benchmarks/results/cpu.csv, between its two markers.

python benchmarks/table.py           rewrite README.md
python benchmarks/table.py --check   exit 1 where README.md differs from the recorded results
"""

from __future__ import annotations

import sys
from pathlib import Path

import postlude
from postlude.check import records
from postlude.check.records import Record

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "cpu.csv"
START, END = "<!-- cpu results: made by benchmarks/table.py -->", "<!-- end of cpu results -->"
SOURCE = Path(postlude.__file__).parent
# What a time on the CPU depends on; a result whose hash differs was measured on other code.
CPU_SOURCES = [
    SOURCE / "plan/cpu.py",
    *(SOURCE / f"run/{name}.py" for name in ("cpu", "library", "moments", "normalize")),
]
HEAD = (
    "| chain | input | layout | eager ms | compile ms | postlude ms | × eager, system malloc | × eager, tuned malloc |\n"
    "|---|---|---|--:|--:|--:|--:|--:|"
)


def render() -> str:
    rows = records.read(RESULTS)
    found = {(row.chain, row.shape, row.layout, row.malloc, row.variant): row for row in rows}
    problems = dict.fromkeys((row.chain, row.shape, row.layout) for row in rows)
    lines = [HEAD]
    for problem in problems:
        eager, rival, ours = (found.get((*problem, "default", name)) for name in ("eager", "torch.compile", "postlude"))
        tuned = found.get((*problem, "tuned", "postlude"))
        chain, shape, layout = problem
        cells = [chain, shape, layout.replace("_", "-"), _ms(eager), _ms(rival), _ms(ours), _gain(ours), _gain(tuned)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _where(rows)])


def stale(rows: list[Record]) -> list[str]:
    """The commits at which rows were measured on code that has changed since."""
    now = records.kernel_hash(CPU_SOURCES)
    return sorted({row.commit for row in rows if row.kernel_hash != now})


def _where(rows: list[Record]) -> str:
    first = rows[0]
    text = (
        f"{first.device}, {first.threads} threads, float32, torch {first.torch}, {first.timestamp[:10]}; medians, and in "
        "brackets an interval that holds the median with 95 % confidence."
    )
    old = stale(rows)
    return text + (f" **Measured before the code changed: at {', '.join(old)}.**" if old else "")


def _ms(row: Record | None) -> str:
    return "" if row is None or row.ms_p50 is None else f"{row.ms_p50:.3g}"


def _gain(row: Record | None) -> str:
    if row is None or row.speedup is None:
        return ""
    return f"{row.speedup:.2f} ({row.speedup_low:.2f}–{row.speedup_high:.2f})"


def rewritten(text: str) -> str:
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{render()}\n{END}{after}"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    new = rewritten(text)
    if "--check" in sys.argv:
        print("README.md is up to date" if new == text else "README.md differs: run python benchmarks/table.py")
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
