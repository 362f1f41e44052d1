"""Draws docs/images/level2.svg from benchmarks/results/h200-kernelbench.csv: every problem of KernelBench's level 2.

python benchmarks/kernelbench_picture.py           draw it
python benchmarks/kernelbench_picture.py --check   exit 1 where it differs from the recorded results

The SVG is written by hand, as that of benchmarks/picture.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from kernelbench_table import CLASSES, PRECISIONS, class_of, place_of, problems
from rows import ROOT, Case

PICTURE = ROOT / "docs" / "images" / "level2.svg"
LEFT, RIGHT, TOP, PANEL, GAP = 52, 14, 58, 190, 74
STEP, BAND = 9, 16  # between problems, and between classes
LEGEND = 780  # columns of the first line
LOW, TICKS = 0.5, (0.5, 1, 2, 5, 10, 20, 50, 100)
MODES = {"forward": "Inference", "training step": "Training step"}


def draw() -> str:
    found = {mode: _ordered(problems(mode)) for mode in MODES}
    width = max(LEGEND, LEFT + RIGHT + max(_width(groups) for groups in found.values()))
    height = TOP + len(found) * (PANEL + GAP)
    parts = [_HEAD.format(width=width, height=height), _legend()]
    for place, (mode, groups) in enumerate(found.items()):
        parts += _panel(MODES[mode], groups, TOP + place * (PANEL + GAP), width)
    return "\n".join([*parts, "</svg>", ""])


def _ordered(found: Sequence[Case]) -> dict[str, list[Case]]:
    """By class, and within one by how much they gain over torch.compile."""
    kinds = {kind: [case for case in found if class_of(case.ours.chain) == kind] for kind in CLASSES}
    return {kind: sorted(each, key=lambda case: -(case.times_compile or 0)) for kind, each in kinds.items() if each}


def _width(groups: dict[str, list[Case]]) -> int:
    return sum(STEP * len(each) + BAND for each in groups.values())


def _panel(title: str, groups: dict[str, list[Case]], top: int, width: int) -> list[str]:
    shown = [case for each in groups.values() for case in each]
    most = max(10.0, *(max(case.times_eager, case.times_compile or 0) for case in shown))

    def place(ratio: float) -> float:
        return round(top + PANEL * (1 - math.log(max(ratio, LOW) / LOW) / math.log(most / LOW)), 1)

    words = PRECISIONS[shown[0].ours.precision]
    parts = [f'<text class="title" x="12" y="{top - 10}">{title}, {len(shown)} problems {words}, NVIDIA H200</text>']
    for tick in (tick for tick in TICKS if tick <= most):
        kind = "one" if tick == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{width - RIGHT}" y1="{place(tick)}" y2="{place(tick)}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{place(tick) + 4}" text-anchor="end">{tick:g}×</text>')
    x = LEFT + BAND // 2
    for kind, each in groups.items():
        parts.append(f'<text class="tick" x="{x}" y="{top + PANEL + 34}">{kind}, {len(each)}</text>')
        for case in each:
            x += STEP
            parts += _marks(case, x, place(case.times_eager), place(case.times_compile or LOW), top + PANEL + 6)
        x += BAND
    return parts


def _marks(case: Case, x: int, eager: float, compiled: float, foot: int) -> list[str]:
    """Two dots on one line; a problem's number below, turned."""
    parts = [f'<line class="grid" x1="{x}" x2="{x}" y1="{eager}" y2="{compiled}"/>'] if case.compiled else []
    for ratio, y, kind in ((case.times_eager, eager, "eager"), (case.times_compile, compiled, "compile")):
        if ratio is not None:
            parts.append(f'<circle class="{kind}{" loss" * (ratio < 1)}" cx="{x}" cy="{y}" r="3.2"/>')
    number = place_of(case.ours.chain)
    spot = f'x="{x}" y="{foot}" transform="rotate(90 {x} {foot})"'
    return [*parts, f'<text class="number" {spot} dominant-baseline="middle">{number}</text>']


def _legend() -> str:
    return (
        '<text class="title" x="12" y="24">Level 2: how many times as fast Postlude is</text>'
        '<circle class="eager" cx="450" cy="20" r="4"/><text x="460" y="24">against eager PyTorch</text>'
        '<circle class="compile" cx="610" cy="20" r="4"/><text x="620" y="24">against torch.compile</text>'
    )


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"
 role="img">
<title>How many times as fast Postlude is as eager PyTorch and as torch.compile, for each problem of level 2</title>
<style>
text {{ font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; }}
.title {{ font-weight: 600; font-size: 14px; }}
.tick {{ font-size: 11px; fill: #57606a; }}
.number {{ font-size: 8px; fill: #57606a; }}
.eager {{ fill: #2f6fb5; }}
.compile {{ fill: #86b6e3; }}
circle.loss {{ fill: #cf4a3a; }}
.grid {{ stroke: #d8dee4; }}
.one {{ stroke: #57606a; stroke-width: 1.5; }}
</style>
<rect width="100%" height="100%" rx="6" fill="#ffffff"/>"""


def main() -> int:
    text = draw()
    if "--check" not in sys.argv:
        PICTURE.write_text(text, encoding="utf-8")
        return 0
    same = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == text
    print(f"{PICTURE.name} " + ("is up to date" if same else "differs: run python benchmarks/kernelbench_picture.py"))
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
