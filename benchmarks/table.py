"""Writes the tables of docs/results.md and the headline of the README from benchmarks/results/*.csv, between markers.

python benchmarks/table.py           rewrite both
python benchmarks/table.py --check   exit 1 where one of them differs from the recorded results

benchmarks/picture.py draws the README's picture from the same files.
"""

from __future__ import annotations

import csv
import functools
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import postlude
from postlude.check import records
from postlude.check.records import Record

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results" / "cpu.csv"
GPU_RESULTS = ROOT / "benchmarks" / "results" / "h200.csv"
KERNELBENCH_RESULTS = ROOT / "benchmarks" / "results" / "h200-kernelbench.csv"
HARNESS_RESULTS = ROOT / "benchmarks" / "results" / "h200-kernelbench-harness.csv"
NETWORK_RESULTS = ROOT / "benchmarks" / "results" / "h200-networks.csv"  # absent until the networks are recorded
SOURCE = Path(postlude.__file__).parent


def _files(folder: str, names: str) -> list[Path]:
    return [SOURCE / folder / f"{name}.py" for name in names.split()]


# What a time depends on; a result whose hash differs was measured on other code.
CPU_SOURCES = [
    *_files(".", "moments expressions steps emit_cpp"),
    *_files("plan", "cpu cpu_passes cpu_few_channels cpu_trained"),
    *_files("stages", "cpu_passes cpu_few_channels cpu_kernel cpu_gradient"),
    *_files("run", "cpp cpu onednn normalize"),
    *sorted((SOURCE / "kernels" / "cpp").glob("*.h")),
]
BUSY = "forward, busy"  # beside as many busy processes as cores
STEP, AUTOCAST = "training step", "bfloat16 autocast"
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
CHAIN_61 = "conv_transpose3d(64→128, k3) → relu → group_norm(8)"
CHAIN_23 = "conv3d(3→24, k3) → group_norm(8) → mean over all but batch"
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
KERNELBENCH_HEAD = (
    "| | problem | eager ms | compile ms | postlude ms | × eager | × compile | code since |\n"
    "|--:|---|--:|--:|--:|--:|--:|---|"
)
NETWORKS_HEAD = (
    "| network | input | precision | mode | eager ms | compile ms | postlude ms | × eager | × compile | code since |\n"
    "|---|---|---|---|--:|--:|--:|--:|--:|---|"
)


@dataclass(frozen=True)
class Case:
    """One problem: eager PyTorch, the fastest of torch.compile's variants, and Postlude."""

    eager: Record
    compiled: Record | None
    ours: Record

    @property
    def times_eager(self) -> float:
        return self.ours.speedup or _median(self.eager) / _median(self.ours)

    @property
    def times_compile(self) -> float | None:
        return None if self.compiled is None else _median(self.compiled) / _median(self.ours)

    @property
    def arithmetic(self) -> str:
        return self.ours.dtype if self.ours.precision == "auto" else self.ours.precision


def cases(path: Path, mode: str, malloc: str = "default") -> list[Case]:
    """The problems of a file in the order of its rows; modes are told by how they begin."""
    rows = [row for row in records.read(path) if row.mode.startswith(mode) and row.malloc == malloc]
    problems: dict[tuple[str, ...], dict[str, Record]] = {}
    for row in rows:
        problem = (row.chain, row.shape, row.dtype, row.precision, row.layout, row.mode)
        problems.setdefault(problem, {})[row.variant] = row
    return [_case(found) for found in problems.values() if {"eager", "postlude"} <= set(found)]


def _case(found: Mapping[str, Record]) -> Case:
    rivals = [row for name, row in found.items() if name.removeprefix("torch.").startswith("compile")]
    return Case(found["eager"], min(rivals, key=_median, default=None), found["postlude"])


def _median(row: Record) -> float:
    assert row.ms_p50 is not None
    return row.ms_p50


def geometric_means(shown: Sequence[Case]) -> tuple[float, float]:
    """Over eager, and over torch.compile."""
    compiled = [case.times_compile for case in shown if case.times_compile is not None]
    return statistics.geometric_mean(case.times_eager for case in shown), statistics.geometric_mean(compiled)


def render_headline() -> str:
    """The README's figures in words."""
    found = {case.ours.chain: case for case in cases(GPU_RESULTS, "forward") if case.arithmetic == "fp32"}
    first, second = (found[chain].times_eager for chain in (CHAIN_61, CHAIN_23))
    forward, training = (cases(KERNELBENCH_RESULTS, mode) for mode in ("forward", "training step"))
    (eager, compiled), (eager_step, compiled_step) = geometric_means(forward), geometric_means(training)
    slower = sum((case.times_compile or 1) < 1 for case in training)
    text = (
        f"On an H200 in fp32, KernelBench's chain 61 runs {first:.1f}× and chain 23 {second:.1f}× as fast as eager "
        "PyTorch. "
        f"Over the {len(forward)} convolution chains of KernelBench's level 2 with TF32 allowed, inference is "
        f"{eager:.2f}× eager and {compiled:.2f}× torch.compile by geometric mean, a training step {eager_step:.2f}× "
        f"and {compiled_step:.2f}×; {slower} of the training steps are slower than torch.compile."
    )
    return "\n".join(textwrap.wrap(text, 118))


def render_gpu() -> str:
    found = cases(GPU_RESULTS, "forward")
    return "\n".join([GPU_HEAD, *(_gpu_line(case, GPU_SOURCES) for case in found), "", _where(_rows(found))])


def render_training() -> str:
    found = cases(GPU_RESULTS, "training step")
    lines = [_gpu_line(case, TRAINING_SOURCES, trains=True) for case in found]
    return "\n".join([TRAINING_HEAD, *lines, "", _where(_rows(found))])


def _gpu_line(case: Case, sources: list[Path], trains: bool = False) -> str:
    ours = case.ours
    chain = ours.chain + (", input frozen" if ours.mode.endswith("frozen") else "")
    cells = [chain, ours.shape, case.arithmetic, ours.layout.replace("_", "-"), *_times(case), _gain(ours)]
    cells += [_number(case.times_compile), _error(ours), _error(case.eager)]
    cells += [f"{row.saved_mib or 0:.0f}" for row in (ours, case.eager)] if trains else []
    return _line(*cells, since(ours, sources))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _times(case: Case) -> tuple[str, str, str]:
    return _ms(case.eager), _ms(case.compiled), _ms(case.ours)


def _rows(found: Sequence[Case]) -> list[Record]:
    return [case.ours for case in found]


def _error(row: Record) -> str:
    return "" if row.error_rms is None else f"{row.error_rms:.1e}"


def render() -> str:
    found = cases(RESULTS, "forward")
    tuned = {(case.ours.chain, case.ours.shape, case.ours.layout): case for case in cases(RESULTS, "forward", "tuned")}
    lines = [HEAD]
    for case in found:
        ours = case.ours
        other = tuned.get((ours.chain, ours.shape, ours.layout))
        gains = _gain(ours), _gain(None if other is None else other.ours)
        layout = ours.layout.replace("_", "-")
        lines.append(_line(ours.chain, ours.shape, layout, *_times(case), *gains, since(ours, CPU_SOURCES)))
    return "\n".join([*lines, "", _where(_rows(found)), *_more(records.read(RESULTS))])


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


def render_kernelbench() -> str:
    return _kernelbench_table("forward", GPU_SOURCES)


def render_kernelbench_training() -> str:
    return _kernelbench_table("training step", TRAINING_SOURCES)


def _kernelbench_table(mode: str, sources: list[Path]) -> str:
    found = sorted(cases(KERNELBENCH_RESULTS, mode), key=lambda case: int(case.ours.chain.split("_")[0]))
    lines = [KERNELBENCH_HEAD]
    for case in found:
        number, _, words = case.ours.chain.partition("_")
        gains = _number(case.times_eager), _number(case.times_compile)
        lines.append(_line(number, words.replace("_", " "), *_times(case), *gains, since(case.ours, sources)))
    means = (f"{mean:.2f}" for mean in geometric_means(found))
    lines.append(f"| | geometric mean of {len(found)} | | | | {' | '.join(means)} | |")
    return "\n".join([*lines, "", _where(_rows(found), intervals=False)])


def render_networks() -> str:
    if not NETWORK_RESULTS.exists():
        return "Not recorded yet: `python benchmarks/networks.py --csv benchmarks/results/h200-networks.csv` does it."
    found = [case for mode in ("training step", "inference") for case in cases(NETWORK_RESULTS, mode)]
    lines = [NETWORKS_HEAD]
    for case in found:
        ours = case.ours
        about = ours.chain, ours.shape, ours.dtype, ours.mode, *_times(case)
        lines.append(_line(*about, _gain(ours), _number(case.times_compile), since(ours, TRAINING_SOURCES)))
    return "\n".join([*lines, "", _where(_rows(found))])


def since(row: Record, sources: list[Path]) -> str:
    """Whether the code that the row's time depends on is what it was."""
    return "same" if row.kernel_hash == _hash_of(tuple(sources)) else "changed"


@functools.cache
def _hash_of(sources: tuple[Path, ...]) -> str:
    return records.kernel_hash(sources)


def _where(rows: Sequence[Record], intervals: bool = True) -> str:
    first = rows[0]
    threads = f", {first.threads} threads, float32" if first.threads else ""
    brackets = ", and in brackets an interval that holds the median with 95 % confidence" if intervals else ""
    days = sorted({row.timestamp[:10] for row in rows})
    commits = ", ".join(sorted({row.commit for row in rows}))
    return (
        f"{first.device}{threads}, torch {first.torch}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, "
        f"at commit {commits}; medians{brackets}."
    )


def _ms(row: Record | None) -> str:
    return "" if row is None or row.ms_p50 is None else f"{row.ms_p50:.3g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


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
    README: {"headline": render_headline},
    PAGE: {
        "gpu": render_gpu,
        "training": render_training,
        "kernelbench": render_kernelbench,
        "kernelbench training": render_kernelbench_training,
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
