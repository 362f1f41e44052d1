"""Times every problem of a folder of KernelBench files on a GPU: PyTorch, torch.compile and Postlude at one precision.

python benchmarks/kernelbench.py DIR --precision tf32 --csv benchmarks/results/h200-kernelbench.csv
python benchmarks/kernelbench.py DIR --only 1,2,61 --jobs 8
python benchmarks/kernelbench.py DIR --train --csv benchmarks/results/h200-kernelbench.csv

With `--train` a step is timed: forward, and backward to every parameter and input.

Every model is verified at the sites of its chains first (`postlude.optimize` does that), and one that is wrong is not
timed. All problems run in one process with inputs made on the card, so that a problem takes seconds; `--jobs` processes
fill the compilers' caches before. `postlude suite` does more with each problem (the whole model's points, ceilings,
memory, a report) and takes longer.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from table import GPU_SOURCES, TRAINING_SOURCES
from torch import Tensor

import postlude
from postlude import problem_file
from postlude.check import clock, records
from postlude.check.modes import pytorch_switches
from postlude.cli.suite import problem_files
from postlude.cli.variants import Call, training_step
from postlude.pipeline import Optimized
from postlude.plan import Plan
from postlude.problem_file import ProblemFile

WINDOW_S = 0.02


@dataclass(frozen=True)
class Settings:
    precision: str
    train: bool
    rounds: int


def prepared(problem: ProblemFile, settings: Settings) -> tuple[dict[str, Call], tuple[Any, ...], Optimized]:
    """What is timed of the three models, each called once, and what Postlude found."""
    with torch.device("cuda"):
        inputs = problem.inputs("cuda")
    ours = problem.build("cuda")
    found = postlude.optimize(ours, inputs, precision=settings.precision)
    eager, compiled = problem.build("cuda"), torch.compile(problem.build("cuda"))
    calls: dict[str, Call] = {"eager": eager, "torch.compile": compiled, "postlude": ours}
    if settings.train:
        with torch.no_grad():
            dy = torch.randn_like(eager(*inputs))
        calls = {name: training_step(model, dy) for name, model in calls.items()}
    for call in calls.values():
        call(*inputs)
    return calls, inputs, found


def measure(path: Path, settings: Settings) -> tuple[list[records.Record], str]:
    """The rows, and the verdict on what is fused."""
    calls, inputs, found = prepared(problem_file.load(path), settings)
    if found.verdict is not None and found.verdict.outcome == "wrong":
        raise RuntimeError(str(found.verdict))
    errors = errors_of(found)
    timings = clock.time_interleaved(
        {name: clock.rotating(call, [inputs]) for name, call in calls.items()},
        rounds=settings.rounds,
        min_window_s=WINDOW_S,
    )
    tensors = [item for item in inputs if isinstance(item, Tensor)]
    shape = " ".join("×".join(map(str, tensor.shape)) for tensor in tensors)
    rows = []
    for name, timing in timings.items():
        rows.append(
            records.Record(
                *(path.stem, shape, str(tensors[0].dtype).removeprefix("torch."), "contiguous", settings.precision),
                *("training step" if settings.train else "forward", name),
                *records.times_of(timing, timings["eager"]),
                error_rms=errors.get(name),
                launches=launches_of(found) if name == "postlude" else None,
                kernel_hash=records.kernel_hash(TRAINING_SOURCES if settings.train else GPU_SOURCES),
                **records.environment("cuda"),  # type: ignore[arg-type]
            )
        )
    return rows, "nothing is fused" if found.verdict is None else found.verdict.outcome


def errors_of(found: Optimized) -> dict[str, float]:
    """The worst site's error by the spread, and PyTorch's own there; nothing where no point could tell."""
    judged = [] if found.verdict is None else [one for one in found.verdict.quantities if one.errors and one.own]
    if not judged:
        return {}
    return {
        "postlude": max(one.errors.rms for one in judged if one.errors),
        "eager": max(one.own.rms for one in judged if one.own),
    }


def launches_of(found: Optimized) -> int:
    return sum(site.outcome.launches for site in found.sites if isinstance(site.outcome, Plan))


def fill_caches(files: list[Path], settings: Settings, jobs: int) -> None:
    """Compiles what the problems need, `jobs` of them at a time, in processes that end before anything is timed."""
    shares = [[str(path) for path in files[number::jobs]] for number in range(jobs)]
    command = [sys.executable, __file__, "--precision", settings.precision, *["--train"] * settings.train, "--prepare"]
    running = [subprocess.Popen([*command, json.dumps(share)], stdout=subprocess.DEVNULL) for share in shares if share]
    for process in running:
        process.wait()


def run_each(files: list[Path], settings: Settings, work: Callable[[Path], None]) -> int:
    """Every file by itself; one that fails is named and stops nothing."""
    failed = 0
    with torch.set_grad_enabled(settings.train), pytorch_switches(settings.precision, torch.device("cuda")):
        for path in files:
            try:
                work(path)
            except Exception as error:  # a stranger's file may raise anything
                failed += 1
                print(f"{path.name}: failed: {str(error).splitlines()[0][:200]}", file=sys.stderr, flush=True)
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--train", action="store_true", help="a training step instead of a forward pass")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="numbers of problems, such as 1,2,61")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = Settings(options.precision, options.train, options.rounds)
    warnings.simplefilter("ignore")
    if options.prepare:
        files = [Path(name) for name in json.loads(options.prepare)]
        return run_each(files, settings, lambda path: void(prepared(problem_file.load(path), settings)))
    files = problem_files(options.folder)
    if options.only:
        files = [path for path in files if path.name.split("_")[0] in options.only.split(",")]
    if options.jobs > 1:
        fill_caches(files, settings, options.jobs)

    def timed(path: Path) -> None:
        rows, verdict = measure(path, settings)
        times = {row.variant: row.ms_p50 or 0.0 for row in rows}
        gains = [f"× {name} {times[name] / times['postlude']:.2f}" for name in ("eager", "torch.compile")]
        print(f"{path.stem[:40]:40}", *(f"{time:.3f}" for time in times.values()), *gains, verdict, flush=True)
        if options.csv:
            records.update(options.csv, rows)

    return run_each(files, settings, timed)


def void(_: object) -> None:
    """Takes what is not wanted, so that it is freed."""


if __name__ == "__main__":
    sys.exit(main())
