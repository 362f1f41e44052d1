"""Registers, spills and shared memory of every Triton launch of real plans, compiled ahead of time; no GPU is needed.

python benchmarks/resources.py benchmarks/results/resources.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kernels import offline
from kernels.test_compile import EVERYWHERE, PLANS, TRAINED, compiled_launches

COLUMNS = ("plan", "pass", "card", "kernel", "warps", "registers", "spilled bytes", "shared bytes", "shared limit")


def main(path: Path) -> None:
    jobs = [(name, 90, False) for name in PLANS] + [(name, 90, True) for name in TRAINED]
    jobs += [(name, card, False) for card in offline.CARDS if card != 90 for name in EVERYWHERE]
    rows = []
    for name, card, trains in jobs:
        with pytest.MonkeyPatch.context() as patch:
            offline.use_card(patch, card)
            for found in compiled_launches(name, card, trains):
                used = offline.resources(found.ptx, card)
                what = "training step" if trains else "forward"
                figures = (found.warps, used.registers, used.spilled, found.shared, offline.CARDS[card])
                rows.append((name, what, f"sm_{card}", found.name, *figures))
        print(f"{name} for sm_{card}: {len(rows)} launches", flush=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


if __name__ == "__main__":
    if not offline.HAS_LIMITS:
        sys.exit("resources.csv is recorded with Triton 3.6; install that.")
    main(Path(sys.argv[1]))
