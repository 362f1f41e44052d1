"""Times every problem of a folder of KernelBench files: PyTorch, torch.compile and Postlude at one precision.

python benchmarks/kernelbench.py DIR --modes forward train --jobs 14 --csv benchmarks/results/h200-kernelbench.csv
python benchmarks/kernelbench.py DIR --only 1,2,61 --precision fp32
python benchmarks/kernelbench.py DIR --modes forward train --shapes other --missing --csv …
python benchmarks/kernelbench.py DIR --variants eager postlude

`train` is a step: forward, and backward to every parameter and input. `--precision` is fp32 (strict), tf32, or auto for
PyTorch's defaults. `--shapes other` takes three quarters of the batch less one and one less along every axis of space:
sizes that no tile was chosen for. Every model is verified at the sites of its chains first (`postlude.optimize` does
that), and one that is wrong is not timed; its error from float64 and PyTorch's own are recorded, and the time that the
problem's bytes and operations take at the card's rates.

`--jobs` processes prepare problems side by side, each all modes of one problem, as long as their memory fits on the
card. They are timed in turn, and while one is, the others are stopped. A problem that fails or takes longer than
`--limit` is a row with its reason. With `--missing`, problems that the CSV has with this code are left out, but not
those that failed: a run that was cut short can go on. Linear layers are strict fp32 with PyTorch's defaults, and are
run and recorded as such.
`postlude suite` does more with each problem (the whole model's points, measured ceilings, a report) and takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from kernelbench_pool import Answer, Pool
from kernelbench_problem import MODES, VARIANTS, Outline, Task, outline_of, prepare, row_of
from kernelbench_table import measured_as
from rows import are_recorded

from postlude.check import records
from postlude.cli.other_shapes import SHAPES
from postlude.cli.suite import problem_files
from postlude.errors import first_line
from postlude.report.model import COMPILE, EAGER, POSTLUDE

CONTEXT_BYTES = 1 << 30  # of a process on the card, beside its tensors
USED = 0.6  # of the card's memory: the rest is for the one check that runs at a time
LEFT_BYTES = 256 << 20  # that a worker may hold between two problems
FAILED = "failed"
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def work() -> int:
    """A worker: one task a line, prepared, timed when told to, answered in one line."""
    _end_with_parent()
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what problems print is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        task = Task(**{name: tuple(item) if isinstance(item, list) else item for name, item in asked.items()})
        said: dict[str, object] = {}
        try:
            prepared = prepare(task)
            _leave_idle()
            print(json.dumps({"ready": True}), file=answers, flush=True)
            if not sys.stdin.readline():
                return 1
            said = {"rows": [asdict(row) for row in prepared.measure()]}
        except Exception as error:  # a stranger's file may raise anything
            said = {"error": first_line(error)[:300], "is_over": "CUDA error" in str(error)}
        prepared = None  # type: ignore[assignment]
        torch._dynamo.reset()
        if _leave_idle() > LEFT_BYTES:  # a compiler's error may keep tensors alive
            said["is_over"] = True
        print(json.dumps(said), file=answers, flush=True)
    return 0


def _end_with_parent() -> None:
    """A worker that is stopped would outlive whoever stopped it, and hold the card's memory."""
    with contextlib.suppress(OSError, AttributeError):
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _leave_idle() -> int:
    """Waits for the card and gives its memory back; the bytes that are still held."""
    gc.collect()
    if not torch.cuda.is_initialized():
        return 0
    with contextlib.suppress(RuntimeError):  # after an error of the card the process is of no more use
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def is_recorded(task: Task, mode: str, known: Iterable[records.Record], shape: str) -> bool:
    """Whether a file has a time of every variant of this problem, with this code."""
    code = records.kernel_hash(task.sources(mode))
    wanted = {VARIANTS[name] for name in task.variants}
    about = (task.name, measured_as(task.name, task.precision), task.recorded_mode(mode), shape)
    found = [row for row in known if (row.chain, row.precision, row.mode, row.shape) == about]
    return are_recorded(wanted, [row for row in found if row.verdict != FAILED], code)


def outlined(tasks: Sequence[Task], known: Sequence[records.Record], keep: Keep) -> list[tuple[Task, Outline]]:
    """The tasks with what is known of them; those that cannot be opened are answered at once."""
    found = []
    for task in tasks:
        try:
            outline = outline_of(task)
        except Exception as error:  # a stranger's file may raise anything
            keep(Answer(task, (), first_line(error)[:300]))
            continue
        modes = tuple(mode for mode in task.modes if not is_recorded(task, mode, known, outline.shape))
        if modes:
            found.append((Task(**{**asdict(task), "modes": modes}), outline))
    return found


class Keep:
    """Shows an answer in one line and records its rows as soon as they are there."""

    def __init__(self, path: Path | None, total: int) -> None:
        self.path, self.total, self.done, self.failed = path, total, 0, 0

    def __call__(self, answer: Answer) -> None:
        self.done += 1
        task, rows = answer.task, answer.rows
        if not rows:
            self.failed += 1
            print(f"{self._place()} {task.name[:40]:40} {FAILED}: {answer.reason}", flush=True)
            rows = tuple(_failure(task, mode, answer.reason) for mode in task.modes)
        for mode in task.modes:
            named = {row.variant: row for row in answer.rows if row.mode == task.recorded_mode(mode)}
            if named:
                print(f"{self._place()} {task.name[:40]:40} {mode:7}", *_words(named), flush=True)
        if self.path is not None:
            records.update(self.path, rows)

    def _place(self) -> str:
        return f"{self.done:3}/{self.total}"


def _failure(task: Task, mode: str, reason: str) -> records.Record:
    try:
        outline = outline_of(task)
    except Exception:  # then its shapes are not known either
        outline = None
    return records.Record(**{**row_of(task, mode, POSTLUDE, outline), "verdict": FAILED, "reason": reason})


def _words(rows: dict[str, records.Record]) -> list[str]:
    words = [f"{name} {row.ms_p50:.3f}" for name, row in rows.items() if row.ms_p50]
    ours = rows.get(POSTLUDE)
    if ours is not None and ours.ms_p50:
        others = {name: row.ms_p50 for name, row in rows.items() if row.ms_p50 and name != POSTLUDE}
        words += [f"× {name} {others[name] / ours.ms_p50:.2f}" for name in (EAGER, COMPILE) if name in others]
        words += [f"{ours.floor_ms / ours.ms_p50:.0%} of the roofline"] if ours.floor_ms else []
    if ours is not None:
        words += [ours.verdict] if ours.verdict == "right" else [f"{ours.verdict}: {ours.reason}".rstrip(": ")]
    words += [f"({name}: {row.reason})" for name, row in rows.items() if row.ms_p50 is None and name != POSTLUDE]
    return words


def card_bytes(device: str, jobs: int) -> int:
    if device != "cuda":
        return 1 << 40
    return int(USED * torch.cuda.get_device_properties(0).total_memory) - jobs * CONTEXT_BYTES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--modes", nargs="+", choices=[*MODES], default=["forward"])
    parser.add_argument("--train", action="store_true", help="the same as --modes train")
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS], default=["eager", "compile", "postlude"])
    parser.add_argument("--precision", choices=["fp32", "tf32", "auto"], default="tf32")
    parser.add_argument("--shapes", choices=SHAPES, default="own")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="numbers of problems, such as 1,2,61")
    parser.add_argument("--jobs", type=int, default=1, help="problems that are prepared at a time")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one problem, without waiting")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--missing", action="store_true", help="leave out what the CSV has, measured with this code")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work()
    warnings.simplefilter("ignore")
    files = problem_files(options.folder)
    if options.only:
        files = [path for path in files if path.name.split("_")[0] in options.only.split(",")]
    modes = ("train",) if options.train else tuple(options.modes)
    variants, more = tuple(options.variants), (options.shapes, options.rounds, options.device)
    tasks = [Task(str(path), modes, variants, measured_as(path.stem, options.precision), *more) for path in files]
    known = records.read(options.csv) if options.missing and options.csv and options.csv.exists() else []
    keep, jobs = Keep(options.csv, len(tasks)), max(1, min(options.jobs, len(tasks)))
    pool = Pool(jobs, card_bytes(options.device, jobs), options.limit, keep)
    ready = outlined(tasks, known, keep)
    keep.total = keep.done + len(ready)
    pool.run(ready)
    return int(keep.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
