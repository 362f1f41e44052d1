"""Writes the tables of docs/results.md and the headline of the README from benchmarks/results/*.csv, between markers.

python benchmarks/table.py           rewrite both
python benchmarks/table.py --check   exit 1 where one of them differs from the recorded results

benchmarks/picture.py draws the README's picture from the same files.
"""

from __future__ import annotations

import csv
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import kernelbench_table
from rows import (
    AUTOCAST,
    BUSY,
    CHAIN_23,
    CHAIN_61,
    CPU_SOURCES,
    GPU_RESULTS,
    GPU_SOURCES,
    HARNESS_RESULTS,
    NETWORK_RESULTS,
    NETWORK_SOURCES,
    RESULTS,
    ROOT,
    STEP,
    TRAINING_SOURCES,
    Case,
    cases,
    error,
    gain,
    line,
    median,
    milliseconds,
    number,
    rows_of,
    since,
    times,
    where,
)

from postlude.check import records
from postlude.check.records import Record

README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
HEAD = (
    "| chain | input | layout | eager ms | compile ms | postlude ms "
    "| × eager, system malloc | × eager, tuned malloc | code since |\n"
    "|---|---|---|--:|--:|--:|--:|--:|---|"
)
GPU_HEAD = (
    "| chain | input | precision | layout | eager ms | compile ms | postlude ms | × eager | × compile | "
    "error | PyTorch's | code since |\n"
    "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|---|"
)
TRAINING_HEAD = (
    "| chain | input | precision | layout | eager ms | compile ms | postlude ms | × eager | × compile | "
    "gradient error | PyTorch's | saved MiB | PyTorch's | code since |\n"
    "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|"
)
NETWORKS_HEAD = (
    "| network | input | precision | mode | eager ms | compile ms | postlude ms | × eager | × compile "
    "| peak MiB: eager | compile | postlude | error | PyTorch's | code since |\n"
    "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|"
)


def render_headline() -> str:
    """The README's figures in words."""
    found = {case.ours.chain: case for case in cases(GPU_RESULTS, "forward") if case.arithmetic == "fp32"}
    first, second = (found[chain].times_eager for chain in (CHAIN_61, CHAIN_23))
    text = (
        "On an H200 in fp32, problem 61 of KernelBench's level 2 (ConvTranspose3d → ReLU → GroupNorm) runs "
        f"{first:.1f}× and problem 23 (Conv3d → GroupNorm → mean) {second:.1f}× as fast as eager PyTorch. "
        f"{kernelbench_table.sentence()}{_networks_sentence()}"
    )
    return "\n".join(textwrap.wrap(text, 118))


def _networks_sentence() -> str:
    """Of training steps, against torch.compile; what is slower, in training or inference, by name."""
    modes = {"training step": "in training", "inference": "in inference"}
    found = {mode: _times_compile(mode) if NETWORK_RESULTS.exists() else {} for mode in modes}
    ahead = [f"{name} {gain:.2f}×" for name, gain in found["training step"].items() if gain >= 1]
    behind = [
        f"{name} {words} ({gain:.2f}×)"
        for mode, words in modes.items()
        for name, gain in found[mode].items()
        if gain < 1
    ]
    if not ahead:
        return ""
    slower = f" Slower than torch.compile: {', '.join(behind)}." if behind else ""
    return (
        f" Training steps of whole networks, against the better of torch.compile's layouts: {', '.join(ahead)}.{slower}"
    )


def _times_compile(mode: str) -> dict[str, float]:
    found = cases(NETWORK_RESULTS, mode)
    return {case.ours.chain: case.times_compile for case in found if case.times_compile is not None}


def render_gpu() -> str:
    found = cases(GPU_RESULTS, "forward")
    return "\n".join([GPU_HEAD, *(_gpu_line(case, GPU_SOURCES) for case in found), "", where(rows_of(found))])


def render_training() -> str:
    found = cases(GPU_RESULTS, "training step")
    lines = [_gpu_line(case, TRAINING_SOURCES, trains=True) for case in found]
    return "\n".join([TRAINING_HEAD, *lines, "", where(rows_of(found))])


def _gpu_line(case: Case, sources: list[Path], trains: bool = False) -> str:
    ours = case.ours
    chain = ours.chain + (", input frozen" if ours.mode.endswith("frozen") else "")
    cells = [chain, ours.shape, case.arithmetic, ours.layout.replace("_", "-"), *times(case), gain(ours)]
    cells += [number(case.times_compile), error(ours), error(case.eager)]
    cells += [f"{row.saved_mib or 0:.0f}" for row in (ours, case.eager)] if trains else []
    return line(*cells, since(ours, sources))


def render() -> str:
    found = cases(RESULTS, "forward")
    tuned = {(case.ours.chain, case.ours.shape, case.ours.layout): case for case in cases(RESULTS, "forward", "tuned")}
    lines = [HEAD]
    for case in found:
        ours = case.ours
        other = tuned.get((ours.chain, ours.shape, ours.layout))
        gains = gain(ours), gain(None if other is None else other.ours)
        layout = ours.layout.replace("_", "-")
        lines.append(line(ours.chain, ours.shape, layout, *times(case), *gains, since(ours, CPU_SOURCES)))
    return "\n".join([*lines, "", where(rows_of(found)), *_more(records.read(RESULTS))])


def _more(rows: list[Record]) -> list[str]:
    """The chain that gains least in each of the other modes."""
    modes = {
        BUSY: "Beside as many busy processes as cores",
        STEP: "Training steps under a tuned malloc",
        AUTOCAST: "bfloat16 autocast under a tuned malloc",
    }
    lines = []
    for mode, words in modes.items():
        ours = [row for row in rows if row.mode == mode and row.variant == "postlude" and row.speedup is not None]
        if ours:
            worst = min(ours, key=lambda row: row.speedup or 0.0)
            mean = statistics.geometric_mean([row.speedup or 0.0 for row in ours])
            least = f"{worst.speedup:.2f} ({worst.chain}, {worst.layout.replace('_', '-')})"
            lines += ["", f"{words}: {mean:.2f} × eager by geometric mean, at the least {least}."]
    return lines


def render_networks() -> str:
    if not NETWORK_RESULTS.exists():
        return "Not recorded yet: `python benchmarks/networks.py --csv benchmarks/results/h200-networks.csv` does it."
    modes = [(mode, has_graphs) for has_graphs in (False, True) for mode in ("training step", "inference")]
    found = {(mode, graphs): cases(NETWORK_RESULTS, mode, has_graphs=graphs) for mode, graphs in modes}
    lines = [NETWORKS_HEAD]
    for case, has_graphs in [(case, graphs) for (_, graphs), some in found.items() for case in some]:
        ours = case.ours
        mode = f"{ours.mode}, CUDA graphs" if has_graphs else ours.mode
        about = ours.chain, ours.shape, ours.dtype, mode, *times(case), gain(ours), number(case.times_compile)
        rows = (case.eager, case.compiled, ours)
        memory = ["" if row is None or row.peak_mib is None else f"{row.peak_mib:.0f}" for row in rows]
        lines.append(line(*about, *memory, error(ours), error(case.eager), since(ours, NETWORK_SOURCES)))
    shown = rows_of([case for some in found.values() for case in some])
    return "\n".join([*lines, "", *_lean_lines(found["training step", False]), where(shown)])


LEAN = "postlude memory=lean"
LEAN_HEAD = (
    '| network, training step with `memory="lean"` | ms | × the default\'s ms | peak MiB: eager | postlude | lean '
    "| error | code since |\n|---|--:|--:|--:|--:|--:|--:|---|"
)


def _lean_lines(steps: Sequence[Case]) -> list[str]:
    """A table of its own: whoever asks for less memory compares with the default, not with torch.compile."""
    lean = {(row.chain, row.shape, row.dtype): row for row in records.read(NETWORK_RESULTS) if row.variant == LEAN}
    lines = []
    for case in steps:
        row = lean.get((case.ours.chain, case.ours.shape, case.ours.dtype))
        if row is None or row.ms_p50 is None or row.mode != case.ours.mode:
            continue
        memory = ["" if one.peak_mib is None else f"{one.peak_mib:.0f}" for one in (case.eager, case.ours, row)]
        cells = row.chain, milliseconds(row), number(median(row) / median(case.ours)), *memory, error(row)
        lines.append(line(*cells, since(row, NETWORK_SOURCES)))
    return [LEAN_HEAD, *lines, ""] if lines else []


HARNESS_HEAD = (
    "| | problem | TF32 off: reference ms | file ms | × | PyTorch's defaults: reference ms | file ms | × | lines |\n"
    "|--:|---|--:|--:|--:|--:|--:|--:|--:|"
)


def render_harness() -> str:
    """Exported files in KernelBench's own harness, in both settings."""
    with HARNESS_RESULTS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = {(row["problem"], row["setting"]): row for row in rows}
    lines, gains = [HARNESS_HEAD], {"strict": [], "default": []}  # type: ignore[var-annotated]
    for name in sorted({row["problem"] for row in rows}, key=lambda name: int(name.split("_")[0])):
        number, _, words = name.partition("_")
        cells = [number, words.replace("_", " ")]
        for setting, each in gains.items():
            row = found.get((name, setting))
            if row is None:
                cells += ["", "no file", ""]
                continue
            reference, ours = float(row["reference_ms"]), float(row["file_ms"])
            if not ours:
                cells += ["", f"{row['right']} of {row['trials']} right", ""]
                continue
            each.append(reference / ours)
            cells += [f"{reference:.3g}", f"{ours:.3g}", f"{each[-1]:.2f}"]
        counted = found.get((name, "strict")) or found[name, "default"]
        lines.append(f"| {' | '.join([*cells, counted['lines']])} |")
    means = [f"{statistics.geometric_mean(each):.2f}" if each else "" for each in gains.values()]
    lines.append(f"| | geometric mean | | | {means[0]} | | | {means[1]} | |")
    right = sum(row["right"] == row["trials"] for row in rows)
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    first = rows[0]
    where = f"{first['device']}, torch {first['torch']}, {first['timestamp'][:10]}, at {commits}; KernelBench's means."
    return "\n".join([*lines, "", f"{right} of {len(rows)} files are right in all five trials. {where}"])


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"headline": render_headline},
    PAGE: {
        "gpu": render_gpu,
        "training": render_training,
        "kernelbench": lambda: kernelbench_table.render("forward"),
        "kernelbench training": lambda: kernelbench_table.render("training step"),
        "harness": render_harness,
        "networks": render_networks,
        "cpu": render,
    },
}


def rewritten(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    for name, table in tables.items():
        start, end = f"<!-- {name} results: made by benchmarks/table.py -->", f"<!-- end of {name} results -->"
        before, rest = text.split(start)
        text = f"{before}{start}\n{table()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    differs = 0
    for path, tables in TABLES.items():
        text = path.read_text(encoding="utf-8")
        new = rewritten(text, tables)
        if "--check" in sys.argv:
            print(f"{path.name} " + ("is up to date" if new == text else "differs: run python benchmarks/table.py"))
            differs |= new != text
        else:
            path.write_text(new, encoding="utf-8")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
