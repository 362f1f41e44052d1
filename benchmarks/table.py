"""Writes the tables of results from benchmarks/results/*.csv into the README and docs/kernelbench.md, between markers.

python benchmarks/table.py           rewrite both
python benchmarks/table.py --check   exit 1 where one of them differs from the recorded results
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import postlude
from postlude.check import records
from postlude.check.records import Record

ROOT = Path(__file__).parents[1]
README, KERNELBENCH = ROOT / "README.md", ROOT / "docs" / "kernelbench.md"
RESULTS = ROOT / "benchmarks" / "results" / "cpu.csv"
GPU_RESULTS = ROOT / "benchmarks" / "results" / "h200.csv"
KERNELBENCH_RESULTS = ROOT / "benchmarks" / "results" / "h200-kernelbench.csv"
HARNESS_RESULTS = ROOT / "benchmarks" / "results" / "h200-kernelbench-harness.csv"
SOURCE = Path(postlude.__file__).parent


def _files(folder: str, names: str) -> list[Path]:
    return [SOURCE / folder / f"{name}.py" for name in names.split()]


# What a time depends on; a result whose hash differs was measured on other code.
CPU_SOURCES = [
    *_files(".", "moments expressions steps emit_cpp"),
    *_files("plan", "cpu cpu_passes cpu_few_channels"),
    *_files("stages", "cpu_passes cpu_few_channels cpu_kernel"),
    *_files("run", "cpp cpu onednn normalize"),
    *sorted((SOURCE / "kernels" / "cpp").glob("*.h")),
]
BUSY = "forward, busy"  # beside as many busy processes as cores
GPU_SOURCES = [
    SOURCE / "kernels" / "cuda",
    *_files("kernels/triton", "pointwise tiles normalize moments planes pack unfold rows channels"),
    *_files("kernels/triton", "epilogue convolve convolve_boxes phases"),
    *_files(".", "expressions steps emit"),
    *_files("plan", "gpu convolve worth gemm boxes phases few_channels tiles channels"),
    *_files("stages", "forward cuts epilogue pack unfold convolve convolve_boxes phases few_channels library"),
    *_files("stages", "normalize rows channels moments trace program"),
    *_files("run", "chain_run runner bound launch compose nvrtc"),
]
TRAINING_SOURCES = [
    *GPU_SOURCES,
    SOURCE / "reverse.py",
    *_files("kernels/triton", "derivatives gradient pack_gradient weight_gradient moments_gradient batch"),
    *_files("plan", "few_channels_gradient trained"),
    *_files("stages", "backward gradient pack_gradient convolution_gradients weight_gradient batch"),
    *_files("stages", "few_channels_gradient moments_gradient"),
]
HEAD = (
    "| chain | input | layout | eager ms | compile ms | postlude ms "
    "| × eager, system malloc | × eager, tuned malloc |\n"
    "|---|---|---|--:|--:|--:|--:|--:|"
)
GPU_HEAD = (
    "| chain | input | precision | layout | eager ms | compile ms | postlude ms | × eager | × compile | "
    "error | PyTorch's |\n"
    "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|"
)


TRAINING_HEAD = (
    "| chain | input | precision | layout | eager ms | compile ms | postlude ms | × eager | × compile | "
    "gradient error | PyTorch's | kept MiB | PyTorch's |\n"
    "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


KERNELBENCH_HEAD = (
    "| | problem | eager ms | compile ms | postlude ms | × eager | × compile |\n|--:|---|--:|--:|--:|--:|--:|"
)


def render_gpu() -> str:
    rows = [row for row in records.read(GPU_RESULTS) if row.mode == "forward"]
    line = _kernelbench_line("forward", "whole models", "the-38-convolution-chains-of-level-2")
    return "\n".join([GPU_HEAD, *_gpu_lines(rows), "", _where(rows, GPU_SOURCES), "", line])


def render_training() -> str:
    rows = [row for row in records.read(GPU_RESULTS) if row.mode.startswith("training step")]
    line = _kernelbench_line("training step", "training steps of whole models", "in-training")
    return "\n".join([TRAINING_HEAD, *_gpu_lines(rows, trains=True), "", _where(rows, TRAINING_SOURCES), "", line])


def _gpu_lines(rows: list[Record], trains: bool = False) -> list[str]:
    found = {(*_problem(row), row.variant): row for row in rows}
    lines = []
    for problem in dict.fromkeys(map(_problem, rows)):
        eager, ours = found[(*problem, "eager")], found[(*problem, "postlude")]
        rivals = [found.get((*problem, name)) for name in ("torch.compile", "torch.compile max-autotune")]
        rival = min((row for row in rivals if row is not None), key=lambda row: row.ms_p50 or 0.0)
        assert rival.ms_p50 is not None
        assert ours.ms_p50 is not None
        chain, shape, dtype, precision, layout, mode = problem
        chain += ", input frozen" if mode.endswith("frozen") else ""
        arithmetic = dtype if precision == "auto" else precision
        cells = [chain, shape, arithmetic, layout.replace("_", "-"), _ms(eager), _ms(rival), _ms(ours), _gain(ours)]
        cells += [f"{rival.ms_p50 / ours.ms_p50:.2f}", _error(ours), _error(eager)]
        cells += [f"{row.saved_mib or 0:.0f}" for row in (ours, eager)] if trains else []
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _problem(row: Record) -> tuple[str, ...]:
    return row.chain, row.shape, row.dtype, row.precision, row.layout, row.mode


def _error(row: Record) -> str:
    return "" if row.error_rms is None else f"{row.error_rms:.1e}"


def render() -> str:
    everything = records.read(RESULTS)
    rows = [row for row in everything if row.mode != BUSY]
    found = {(row.chain, row.shape, row.layout, row.malloc, row.variant): row for row in rows}
    problems = dict.fromkeys((row.chain, row.shape, row.layout) for row in rows)
    lines = [HEAD]
    for problem in problems:
        eager, rival, ours = (found.get((*problem, "default", name)) for name in ("eager", "torch.compile", "postlude"))
        tuned = found.get((*problem, "tuned", "postlude"))
        chain, shape, layout = problem
        cells = [chain, shape, layout.replace("_", "-"), _ms(eager), _ms(rival), _ms(ours), _gain(ours), _gain(tuned)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _where(rows, CPU_SOURCES), *_busy(everything)])


def _busy(rows: list[Record]) -> list[str]:
    """The chain that gains least beside busy processes."""
    ours = [row for row in rows if row.mode == BUSY and row.variant == "postlude" and row.speedup is not None]
    if not ours:
        return []
    worst = min(ours, key=lambda row: row.speedup or 0.0)
    mean = statistics.geometric_mean([row.speedup or 0.0 for row in ours])
    least = f"{worst.speedup:.2f} ({worst.chain}, {worst.layout.replace('_', '-')})"
    return ["", f"Beside as many busy processes as cores: {mean:.2f} × eager by geometric mean, at the least {least}."]


def render_kernelbench() -> str:
    return _kernelbench_table("forward", GPU_SOURCES)


def render_kernelbench_training() -> str:
    return _kernelbench_table("training step", TRAINING_SOURCES)


def _kernelbench_table(mode: str, sources: list[Path]) -> str:
    rows = _kernelbench_rows(mode)
    found = {(row.chain, row.variant): row.ms_p50 or 0.0 for row in rows}
    names = sorted({row.chain for row in rows}, key=lambda name: int(name.split("_")[0]))
    gains, lines = _kernelbench_gains(mode), [KERNELBENCH_HEAD]
    for name in names:
        number, _, words = name.partition("_")
        times = (f"{found[name, variant]:.3g}" for variant in ("eager", "torch.compile", "postlude"))
        cells = [number, words.replace("_", " "), *times, *(f"{each[name]:.2f}" for each in gains)]
        lines.append(f"| {' | '.join(cells)} |")
    means = [f"{statistics.geometric_mean(each.values()):.2f}" for each in gains]
    lines.append(f"| | geometric mean of {len(names)} | | | | {' | '.join(means)} |")
    return "\n".join([*lines, "", _where(rows, sources, intervals=False)])


def _kernelbench_rows(mode: str) -> list[Record]:
    return [row for row in records.read(KERNELBENCH_RESULTS) if row.mode == mode]


def _kernelbench_gains(mode: str) -> list[dict[str, float]]:
    """Of each problem over eager, and over torch.compile."""
    rows = _kernelbench_rows(mode)
    found = {(row.chain, row.variant): row.ms_p50 or 0.0 for row in rows}
    names = dict.fromkeys(row.chain for row in rows)
    rivals = ("eager", "torch.compile")
    return [{name: found[name, rival] / found[name, "postlude"] for name in names} for rival in rivals]


def _kernelbench_line(mode: str, what: str, place: str) -> str:
    gains = [list(each.values()) for each in _kernelbench_gains(mode)]
    means = [statistics.geometric_mean(each) for each in gains]
    slower = [sum(gain < 1 for gain in each) for each in gains]
    return (
        f"KernelBench's {len(gains[0])} convolution chains of level 2, {what} with TF32 allowed: "
        f"{means[0]:.2f} × eager and {means[1]:.2f} × torch.compile by geometric mean; "
        f"{slower[0]} slower than eager, {slower[1]} than torch.compile ([every one](docs/kernelbench.md#{place}))."
    )


def stale(rows: list[Record], sources: list[Path]) -> list[str]:
    """The commits at which rows were measured on code that has changed since."""
    now = records.kernel_hash(sources)
    return sorted({row.commit for row in rows if row.kernel_hash != now})


def _where(rows: list[Record], sources: list[Path], intervals: bool = True) -> str:
    first = rows[0]
    threads = f", {first.threads} threads, float32" if first.threads else ""
    brackets = ", and in brackets an interval that holds the median with 95 % confidence" if intervals else ""
    text = f"{first.device}{threads}, torch {first.torch}, {first.timestamp[:10]}; medians{brackets}."
    old = stale(rows, sources)
    return text + (f" **Measured before the code changed: at {', '.join(old)}.**" if old else "")


def _ms(row: Record | None) -> str:
    return "" if row is None or row.ms_p50 is None else f"{row.ms_p50:.3g}"


def _gain(row: Record | None) -> str:
    if row is None or row.speedup is None:
        return ""
    return f"{row.speedup:.2f} ({row.speedup_low:.2f}–{row.speedup_high:.2f})"


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
            each.append(reference / ours)
            cells += [f"{reference:.3g}", f"{ours:.3g}", f"{each[-1]:.2f}"]
        lines.append(f"| {' | '.join([*cells, found[name, 'strict']['lines']])} |")
    means = [f"{statistics.geometric_mean(each):.2f}" for each in gains.values()]
    lines.append(f"| | geometric mean | | | {means[0]} | | | {means[1]} | |")
    right = sum(row["right"] == row["trials"] for row in rows)
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    first = rows[0]
    where = f"{first['device']}, torch {first['torch']}, {first['timestamp'][:10]}, at {commits}; KernelBench's means."
    return "\n".join([*lines, "", f"{right} of {len(rows)} files are right in all five trials. {where}"])


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"cpu": render, "gpu": render_gpu, "training": render_training},
    KERNELBENCH: {
        "harness": render_harness,
        "kernelbench": render_kernelbench,
        "kernelbench training": render_kernelbench_training,
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
