"""Draws docs/images/speed.svg, the README's picture, from benchmarks/results/*.csv.

python benchmarks/picture.py           draw it
python benchmarks/picture.py --check   exit 1 where it differs from the recorded results

The SVG is written by hand, so that the same results give the same bytes with every version of every library.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import kernelbench_table
from rows import (
    CHAIN_23,
    CHAIN_61,
    GPU_RESULTS,
    NETWORK_RESULTS,
    RESULTS,
    ROOT,
    Case,
    cases,
    geometric_means,
)

PICTURE = ROOT / "docs" / "images" / "speed.svg"
NETWORKS = ("nnU-Net", "UNet3D crg", "SegResNet")
NAMES = {
    CHAIN_61: "61: ConvTranspose3d → ReLU → GroupNorm",
    CHAIN_23: "23: Conv3d → GroupNorm → mean",
    "tf32": "TF32",
    "bfloat16": "bf16",
    "float16": "fp16",
}
WIDTH, LEFT, RIGHT = 900, 390, 60  # the labels' column, and room for the longest bar's figure
LINE, BAR, HEAD = 27, 10, 34  # heights of a row, of one of its two bars, and of a group's title
LOW, TICKS = 0.5, (0.5, 1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class Row:
    label: str
    eager: float
    compiled: float | None


@dataclass(frozen=True)
class Group:
    title: str
    rows: tuple[Row, ...]


def groups() -> list[Group]:
    found = [
        _gpu_group("Inference, NVIDIA H200", "forward"),
        _gpu_group("Training step, NVIDIA H200", "training step"),
        *_network_groups(),
        _cpu_group(),
    ]
    return [group for group in found if group.rows]


def _gpu_group(title: str, mode: str) -> Group:
    chains = [case for case in cases(GPU_RESULTS, mode) if case.ours.mode == mode]
    named = [case for name in (CHAIN_61, CHAIN_23) for case in chains if case.ours.chain == name]
    problems = kernelbench_table.problems(mode)
    words = NAMES.get(problems[0].ours.precision, problems[0].ours.precision)
    mean = Row(f"KernelBench, geometric mean of {len(problems)} ({words})", *geometric_means(problems))
    least = min(problems, key=lambda case: case.times_compile or math.inf)
    number = least.ours.chain.split("_")[0]
    worst = _row(least, f"KernelBench, lowest against compile: {number}")
    return Group(title, (*map(_row, named), mean, worst, _row(_lowest(chains), f"lowest of {len(chains)} chains")))


def _network_groups() -> list[Group]:
    if not NETWORK_RESULTS.exists():
        return []
    made = []
    for mode in ("training step", "inference"):
        found = cases(NETWORK_RESULTS, mode)
        named = [case for case in found if case.ours.chain in NETWORKS]
        others = [case for case in found if case.ours.chain not in NETWORKS]
        rows = [_row(case, f"{case.ours.chain}, {case.ours.dtype}") for case in named]
        if others:
            least = _lowest(others)
            rows.append(_row(least, f"lowest of the other {len(others)}: {least.ours.chain}"))
        made.append(Group(f"Networks, {mode}, NVIDIA H200", tuple(rows)))
    return made


def _cpu_group() -> Group:
    found = cases(RESULTS, "forward")
    named = []
    for chain in (CHAIN_61, CHAIN_23):
        of = [case for case in found if case.ours.chain == chain and case.ours.layout == "contiguous"]
        named.append(_row(max(of, key=lambda case: case.eager.ms_p50 or 0)))
    threads = found[0].ours.threads
    lowest = _row(_lowest(found), f"lowest of {len(found)} chains")
    return Group(f"Inference, CPU, {threads} threads, float32", (*named, lowest))


def _lowest(found: Sequence[Case]) -> Case:
    return min(found, key=lambda case: min(case.times_eager, case.times_compile or math.inf))


def _row(case: Case, label: str = "") -> Row:
    name = NAMES.get(case.ours.chain, case.ours.chain)
    arithmetic = NAMES.get(case.arithmetic, case.arithmetic)
    return Row(label or f"{name}, {arithmetic}", case.times_eager, case.times_compile)


def draw(shown: Sequence[Group]) -> str:
    height = 46 + sum(HEAD + LINE * len(group.rows) for group in shown) + 30
    most = max(max(row.eager, row.compiled or 0) for group in shown for row in group.rows)
    span = math.log(max(most, 10) / LOW)

    def place(ratio: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * math.log(max(ratio, LOW) / LOW) / span, 1)

    parts = [_legend()]
    y = 46
    for group in shown:
        y += HEAD
        parts.append(f'<text class="title" x="12" y="{y - 10}">{group.title}</text>')
        for row in group.rows:
            parts += _bars(row, y, place)
            y += LINE
    axis = [_tick(tick, place(tick), 40, y + 4) for tick in TICKS if tick <= most]
    return "\n".join([_HEAD.format(width=WIDTH, height=height), *axis, *parts, "</svg>", ""])


def _bars(row: Row, y: int, place: Callable[[float], float]) -> list[str]:
    parts = [f'<text x="{LEFT - 14}" y="{y + BAR + 4}" text-anchor="end">{row.label}</text>']
    for number, (ratio, kind) in enumerate(((row.eager, "eager"), (row.compiled, "compile"))):
        if ratio is None:
            continue
        top, one, end = y + number * (BAR + 1), place(1), place(ratio)
        loss = " loss" if ratio < 1 else ""
        box = f'x="{min(one, end)}" y="{top}" width="{max(abs(round(end - one, 1)), 1)}" height="{BAR}"'
        parts.append(f'<rect class="{kind}{loss}" {box}/>')
        parts.append(f'<text class="figure{loss}" x="{max(one, end) + 5}" y="{top + BAR - 1}">{ratio:.2f}×</text>')
    return parts


def _tick(ratio: float, x: float, top: int, bottom: int) -> str:
    line = f'<line class="{"one" if ratio == 1 else "grid"}" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
    return f'{line}<text class="tick" x="{x}" y="{bottom + 16}" text-anchor="middle">{ratio:g}×</text>'


def _legend() -> str:
    return (
        '<text class="title" x="12" y="24">How many times as fast Postlude is</text>'
        f'<rect class="eager" x="{LEFT}" y="14" width="22" height="{BAR}"/>'
        f'<text x="{LEFT + 28}" y="24">against eager PyTorch</text>'
        f'<rect class="compile" x="{LEFT + 190}" y="14" width="22" height="{BAR}"/>'
        f'<text x="{LEFT + 218}" y="24">against torch.compile</text>'
        f'<text class="tick loss" x="{LEFT + 375}" y="24">red: slower</text>'
    )


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"
 role="img">
<title>How many times as fast Postlude is as eager PyTorch and as torch.compile, from the recorded results</title>
<style>
text {{ font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; }}
.title {{ font-weight: 600; font-size: 14px; }}
.tick, .figure {{ font-size: 11px; fill: #57606a; }}
.eager {{ fill: #2f6fb5; }}
.compile {{ fill: #86b6e3; }}
rect.loss {{ fill: #cf4a3a; }}
.figure.loss, .tick.loss {{ fill: #b03a2c; font-weight: 600; }}
.grid {{ stroke: #d8dee4; }}
.one {{ stroke: #57606a; stroke-width: 1.5; }}
</style>
<rect width="100%" height="100%" rx="6" fill="#ffffff"/>"""


def main() -> int:
    text = draw(groups())
    if "--check" not in sys.argv:
        PICTURE.write_text(text, encoding="utf-8")
        return 0
    same = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == text
    print(f"{PICTURE.name} " + ("is up to date" if same else "differs: run python benchmarks/picture.py"))
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
