"""Recorded results as cases: eager PyTorch, torch.compile and Postlude on one problem, and what a time depends on."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import postlude
from postlude.check import records
from postlude.check.records import Record
from postlude.report.model import POSTLUDE

ROOT = Path(__file__).parents[1]
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
    *_files("run", "cpp cpu onednn cpu_norms"),
    *sorted((SOURCE / "kernels" / "cpp").glob("*.h")),
]
BUSY = "forward, busy"  # beside as many busy processes as cores
STEP, AUTOCAST = "training step", "bfloat16 autocast"


def _gpu_files(folder: str, is_backward: bool) -> list[Path]:
    """Of one pass: new kernels and stages count without being listed."""
    words = ("gradient", "derivatives", "backward", "trained")
    files = sorted(path for path in (SOURCE / folder).glob("*.py") if not path.name.startswith(("cpu", "__init__")))
    return [path for path in files if any(word in path.stem for word in words) is is_backward]


_FOLDERS = ("kernels/triton", "plan", "stages")
GPU_SOURCES = [
    SOURCE / "kernels" / "cuda",
    *(path for folder in _FOLDERS for path in _gpu_files(folder, is_backward=False)),
    *_files(".", "expressions steps emit"),
    *_files("run", "chain_run runner bound launch compose nvrtc"),
]
TRAINING_SOURCES = [
    *GPU_SOURCES,
    SOURCE / "reverse.py",
    *(path for folder in _FOLDERS for path in _gpu_files(folder, is_backward=True)),
]
NETWORK_SOURCES = [  # and what finds and lays out the chains of a network
    *TRAINING_SOURCES,
    *sorted((SOURCE / "graph").glob("*.py")),
    *_files("run", "direct layouts operator operator_passes pool_gradient upsample"),
]
CHAIN_61 = "conv_transpose3d(64→128, k3) → relu → group_norm(8)"
CHAIN_23 = "conv3d(3→24, k3) → group_norm(8) → mean over all but batch"


@dataclass(frozen=True)
class Case:
    """One problem: eager PyTorch, the fastest of torch.compile's variants, and Postlude."""

    eager: Record
    compiled: Record | None
    ours: Record

    @property
    def times_eager(self) -> float:
        return self.ours.speedup or median(self.eager) / median(self.ours)

    @property
    def times_compile(self) -> float | None:
        return None if self.compiled is None else median(self.compiled) / median(self.ours)

    @property
    def arithmetic(self) -> str:
        return self.ours.dtype if self.ours.precision == "auto" else self.ours.precision


GRAPHS = " reduce-overhead"  # ends the name of a variant whose launches CUDA graphs replay


def cases(path: Path, mode: str, malloc: str = "default", has_graphs: bool = False) -> list[Case]:
    """The problems of a file in the order of its rows; modes are told by how they begin. With `has_graphs`, those that
    were also measured with CUDA graphs, on both sides."""
    rows = [row for row in records.read(path) if row.mode.startswith(mode) and row.malloc == malloc]
    rows = [row for row in rows if row.mode != BUSY or mode == BUSY]
    rows = [row for row in rows if row.ms_p50 is not None]  # others say why there is no time
    problems: dict[tuple[str, ...], dict[str, Record]] = {}
    for row in rows:
        problem = (row.chain, row.shape, row.dtype, row.precision, row.layout, row.mode)
        problems.setdefault(problem, {})[row.variant] = row
    found = [_with_graphs(one) if has_graphs else one for one in problems.values()]
    return [_case(one) for one in found if {"eager", "postlude"} <= set(one)]


def _with_graphs(found: Mapping[str, Record]) -> dict[str, Record]:
    replayed = {name.removesuffix(GRAPHS): row for name, row in found.items() if name.endswith(GRAPHS)}
    return {**{name: row for name, row in found.items() if name == "eager"}, **replayed}


def _case(found: Mapping[str, Record]) -> Case:
    found = {name: row for name, row in found.items() if not name.endswith(GRAPHS)}
    rivals = [row for name, row in found.items() if name.removeprefix("torch.").startswith("compile")]
    return Case(found["eager"], min(rivals, key=median, default=None), found["postlude"])


def median(row: Record) -> float:
    assert row.ms_p50 is not None
    return row.ms_p50


def geometric_means(shown: Sequence[Case]) -> tuple[float, float]:
    """Over eager, and over torch.compile."""
    compiled = [case.times_compile for case in shown if case.times_compile is not None]
    return statistics.geometric_mean(case.times_eager for case in shown), statistics.geometric_mean(compiled)


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def times(case: Case) -> tuple[str, str, str]:
    return milliseconds(case.eager), milliseconds(case.compiled), milliseconds(case.ours)


def rows_of(found: Sequence[Case]) -> list[Record]:
    return [case.ours for case in found]


def error(row: Record) -> str:
    return "" if row.error_rms is None else f"{row.error_rms:.1e}"


def since(row: Record, sources: list[Path]) -> str:
    """Whether the code that the row's time depends on is what it was."""
    return "same" if row.kernel_hash == _hash_of(tuple(sources)) else "changed"


def are_recorded(variants: Iterable[str], found: Iterable[Record], code: str) -> bool:
    """Whether every variant has a time, or a reason for having none; ours with this code."""
    timed = [row for row in found if row.ms_p50 is not None or row.reason]
    return set(variants) <= {
        row.variant for row in timed if row.kernel_hash == code or not row.variant.startswith(POSTLUDE)
    }


@functools.cache
def _hash_of(sources: tuple[Path, ...]) -> str:
    return records.kernel_hash(sources)


def where(rows: Sequence[Record], intervals: bool = True) -> str:
    first = rows[0]
    threads = f", {first.threads} threads, float32" if first.threads else ""
    brackets = ", and in brackets an interval that holds the median with 95 % confidence" if intervals else ""
    days = sorted({row.timestamp[:10] for row in rows})
    commits = ", ".join(sorted({row.commit for row in rows}))
    return (
        f"{first.device}{threads}, torch {first.torch}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, "
        f"at commit {commits}; medians{brackets}."
    )


def milliseconds(row: Record | None) -> str:
    return "" if row is None or row.ms_p50 is None else f"{row.ms_p50:.3g}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def gain(row: Record | None) -> str:
    if row is None or row.speedup is None:
        return ""
    return f"{row.speedup:.2f} ({row.speedup_low:.2f}–{row.speedup_high:.2f})"
