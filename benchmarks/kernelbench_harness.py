"""Runs exported files in KernelBench's own harness: its construction, its correctness trials, its timing, on a GPU.

python benchmarks/kernelbench_harness.py CHECKOUT --csv benchmarks/results/h200-kernelbench-harness.csv
python benchmarks/kernelbench_harness.py CHECKOUT --only 23,61 --setting strict
python benchmarks/kernelbench_harness.py CHECKOUT --static

CHECKOUT is a clone of KernelBench. Each problem of its level 2 is exported by `postlude optimize FILE -o OUT` and
handed to `eval_kernel_against_ref`, as KernelBench hands over a model's answer. There are two settings:

strict    TF32 is off, files are written with `--precision fp32`
default   PyTorch's switches as they are (its convolutions compute in TF32), files with `--convolution pytorch`

Files are exported and tried by `--jobs` processes at a time. One process then times them, one after the other; each row
is written as soon as it is timed. A file that ends KernelBench's process, or takes longer than `--limit` seconds, is a
row that says so. A file that is in `--files` already is taken as it is; `--static --files FOLDER` writes them without a
GPU, for an H200. `--missing` leaves out what the CSV has from this commit. Modules that KernelBench imports for
other purposes (its clients of language models) are stood in for where they are missing.
`--static` needs no GPU: KernelBench's static checker, which looks for cheating in a file's text, reads all files.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from postlude.check import records
from postlude.files import write_whole

SETTINGS = {"strict": ("--precision", "fp32"), "default": ("--convolution", "pytorch")}
STAND_INS = ("requests", "dotenv", "tqdm", "openai", "litellm")
TRIALS = 5


@dataclass(frozen=True)
class Row:
    """One file in one setting. Times are KernelBench's means, in milliseconds."""

    problem: str
    setting: str
    right: int = 0  # of `trials`
    trials: int = TRIALS
    reference_ms: float = 0.0
    file_ms: float = 0.0
    lines: int = 0
    export_s: float = 0.0  # beside the other jobs
    remark: str = ""
    device: str = ""
    torch: str = ""
    triton: str = ""
    commit: str = ""
    timestamp: str = ""

    @property
    def speedup(self) -> float:
        return self.reference_ms / self.file_ms if self.file_ms else 0.0


def exported(problem: Path, setting: str, folder: Path, *more: str) -> tuple[Row, Path | None]:
    """The file of one problem, and how long it took to write; no file where there is no chain to fuse."""
    target = folder / f"{problem.stem}-{setting}.py"
    if target.exists():
        return Row(problem.stem, setting, lines=_lines_of(target)), target
    command = [sys.executable, "-m", "postlude", "optimize", str(problem), "-o", str(target)]
    start = time.perf_counter()
    done = subprocess.run([*command, *SETTINGS[setting], *more], capture_output=True, text=True, check=False)
    row = Row(problem.stem, setting, export_s=round(time.perf_counter() - start, 1))
    if done.returncode or not target.exists():
        said = (done.stderr or done.stdout).strip().splitlines()
        return replace(row, remark=" ".join(said[-1:])[:200] or f"exit code {done.returncode}"), None
    return replace(row, lines=_lines_of(target)), target


def _lines_of(file: Path) -> int:
    return len(file.read_text("utf-8").splitlines())


Job = tuple[Path, Path, str]  # a problem, its file and the setting
Answer = dict[str, Any]


def tried(
    checkout: Path, jobs: Sequence[Job], told: Callable[[Answer], None], limit: float, trials: int, timings: int
) -> None:
    """Tells what KernelBench says of these files, from a process of its own, and from another one where that ends."""
    left = list(jobs)
    while left:
        before = len(left)
        work = json.dumps([[str(problem), str(file), setting] for problem, file, setting in left])
        options = ["--evaluate", work, "--trials", str(trials), "--timings", str(timings)]
        command = [sys.executable, __file__, str(checkout), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            watch = _watch(process, limit)
            for line in process.stdout:
                if line.startswith("ANSWER "):
                    watch.cancel()
                    told(json.loads(line.removeprefix("ANSWER ")))
                    left.pop(0)
                    watch = _watch(process, limit)
            watch.cancel()
        if left and (process.returncode or len(left) == before):
            problem, _, setting = left.pop(0)
            remark = f"KernelBench's process ended with {process.returncode}"
            told({"problem": problem.stem, "setting": setting, "remark": remark})


def _watch(process: subprocess.Popen[str], limit: float) -> threading.Timer:
    timer = threading.Timer(limit, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def evaluate(checkout: Path, jobs: Iterable[Sequence[str]], trials: int, timings: int) -> None:
    """The child: KernelBench's own evaluation of each file, an answer a line."""
    harness = harness_of(checkout)
    import torch

    for problem, file, setting in jobs:
        torch.backends.cudnn.allow_tf32 = setting == "default"
        result = harness.eval_kernel_against_ref(
            Path(problem).read_text("utf-8"),
            Path(file).read_text("utf-8"),
            num_correct_trials=trials,
            num_perf_trials=max(1, timings),
            measure_performance=timings > 0,
            backend="triton",
            device=torch.device("cuda:0"),
        )
        if result is None:  # "a lock file error", which is to be tried again
            raise RuntimeError(f"KernelBench has no result for {file}")
        found = dict(result.metadata)
        passed = str(found.get("correctness_trials", "(0 / 0)")).strip("()").split("/")[0]
        answer = {
            "problem": Path(problem).stem,
            "setting": setting,
            "right": int(passed),
            "reference_ms": max(0.0, float(result.ref_runtime)),  # it writes -1 for none
            "file_ms": max(0.0, float(result.runtime)),
            "remark": "; ".join(f"{key}: {found[key]}" for key in found if "error" in key or "diff" in key)[:200],
        }
        print(f"ANSWER {json.dumps(answer)}", flush=True)
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # an error of the card: this process is of no more use
            return


def harness_of(checkout: Path) -> Any:
    """KernelBench's module `eval`."""
    for name in STAND_INS:
        if importlib.util.find_spec(name) is None:
            module = sys.modules[name] = types.ModuleType(name)
            module.__getattr__ = lambda _: _nothing  # type: ignore[method-assign]
    if importlib.util.find_spec("pydantic") is None:
        sys.modules["pydantic"] = types.ModuleType("pydantic")
        sys.modules["pydantic"].BaseModel = Values  # type: ignore[attr-defined]
    sys.path.insert(0, str(checkout / "src"))
    from kernelbench import eval as harness

    return harness


def _nothing(*_: Any, **__: Any) -> None:
    """In place of whatever a module that is missing would do."""


class Values:
    """In pydantic's place: attributes by their names, and the class's own where none is given."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update({name: dict(own) for name, own in vars(type(self)).items() if isinstance(own, dict)})
        self.__dict__.update(values)


def measured(
    checkout: Path, work: Sequence[tuple[Path, str]], options: argparse.Namespace, keep: Callable[[Row], None]
) -> None:
    """Exports and tries all, then times those that are right; keeps each row once nothing is missing in it."""
    rows: dict[tuple[str, str], Row] = {}
    folder = Path(options.files or tempfile.mkdtemp(prefix="postlude-kernelbench-"))
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Job] = []

    def note(answer: Answer) -> None:
        place = answer["problem"], answer["setting"]
        row = rows[place] = replace(
            rows[place], **{name: answer[name] for name in ("right", "remark") if name in answer}
        )
        if row.right < TRIALS:
            keep(row)

    def note_times(answer: Answer) -> None:
        place = answer["problem"], answer["setting"]
        names = [name for name in ("reference_ms", "file_ms") if name in answer]
        names += ["remark"] if not answer.get("file_ms") else []
        row = rows[place] = replace(rows[place], **{name: answer[name] for name in names})
        keep(row)

    with ThreadPoolExecutor(options.jobs) as pool:
        more = ["--device", "cuda", *(["--no-verify"] if options.no_verify else [])]
        for (problem, setting), (row, file) in zip(work, pool.map(lambda job: exported(*job, folder, *more), work)):
            rows[problem.stem, setting] = row
            if file is None:
                print(f"{problem.stem[:50]:50} {setting:8} no file: {row.remark}", flush=True)
            else:
                files.append((problem, file, setting))
        shares = [files[number :: options.jobs] for number in range(options.jobs)]
        list(pool.map(lambda share: tried(checkout, share, note, options.limit, TRIALS, 0), shares))
    right = [job for job in files if rows[job[0].stem, job[2]].right == TRIALS]
    print(f"{len(right)} of {len(files)} files are right in all {TRIALS} trials", flush=True)
    tried(checkout, right, note_times, options.limit, 0, options.timings)


def read_by_checker(checkout: Path, work: Sequence[tuple[Path, str]], jobs: int, files: str | None) -> int:
    """Prints what KernelBench's static checker says of each file; the number of files that it refuses."""
    path = checkout / "src" / "kernelbench" / "kernel_static_checker.py"  # importing its package patches torch
    spec = importlib.util.spec_from_file_location("kernel_static_checker", path)
    assert spec is not None
    assert spec.loader is not None
    checker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checker)
    refused = 0
    with tempfile.TemporaryDirectory() as passing, ThreadPoolExecutor(jobs) as pool:
        folder = Path(files or passing)
        folder.mkdir(parents=True, exist_ok=True)
        made = pool.map(lambda job: exported(*job, folder, "--no-verify"), work)
        for (problem, setting), (row, file) in zip(work, made):
            text = "" if file is None else file.read_text("utf-8")
            backend = "triton" if "@triton.jit" in text or "__global__" not in text else "cuda"
            is_valid, errors, _ = checker.validate_kernel_static(text, backend=backend, precision="fp32")
            said = row.remark if file is None else "accepted" if is_valid else "; ".join(errors)
            refused += not is_valid
            print(f"{problem.stem[:50]:50} {setting:8} {said}", flush=True)
    print(f"{len(work) - refused} of {len(work)} files accepted")
    return refused


def where() -> Mapping[str, str]:
    found = records.environment("cuda")
    return {name: found[name] for name in ("device", "torch", "triton", "commit", "timestamp")}


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merges the rows into the file by problem and setting."""
    kept = {(row.problem, row.setting): row for row in (read(path) if path.exists() else [])}
    kept |= {(row.problem, row.setting): row for row in rows}
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in kept.values())
    write_whole(path, text.getvalue())


def read(path: Path) -> list[Row]:
    numbers = {"right": int, "trials": int, "lines": int, "reference_ms": float, "file_ms": float, "export_s": float}
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(**{k: numbers.get(k, str)(v) for k, v in row.items()}) for row in csv.DictReader(file)]  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--setting", choices=[*SETTINGS, "both"], default="both")
    parser.add_argument("--only", help="numbers of problems, such as 23,61")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--timings", type=int, default=30, help="of each model, after KernelBench's warm-up")
    parser.add_argument("--no-verify", action="store_true", help="KernelBench alone judges the files; minutes less")
    parser.add_argument("--files", help="keep the exported files in this folder, and take those that are there")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one file in KernelBench")
    parser.add_argument("--missing", action="store_true", help="leave out what the CSV has from this commit")
    parser.add_argument("--static", action="store_true", help="only KernelBench's static checker; needs no GPU")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--evaluate", help=argparse.SUPPRESS)
    parser.add_argument("--trials", type=int, default=TRIALS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.evaluate:
        evaluate(options.checkout, json.loads(options.evaluate), options.trials, options.timings)
        return 0
    problems = sorted(
        (options.checkout / "KernelBench" / "level2").glob("*.py"), key=lambda p: int(p.name.split("_")[0])
    )
    if options.only:
        problems = [path for path in problems if path.name.split("_")[0] in options.only.split(",")]
    settings = list(SETTINGS) if options.setting == "both" else [options.setting]
    work = [(problem, setting) for problem in problems for setting in settings]
    if options.static:
        return int(read_by_checker(options.checkout, work, options.jobs, options.files) > 0)
    if options.missing and options.csv and options.csv.exists():
        today = {(row.problem, row.setting) for row in read(options.csv) if row.commit == records.commit()}
        work = [job for job in work if (job[0].stem, job[1]) not in today]
    rows: list[Row] = []
    lock = threading.Lock()

    def keep(row: Row) -> None:
        """Shows a row and records it."""
        times = f"{row.reference_ms:8.3f} {row.file_ms:8.3f} {row.speedup:6.2f}x" if row.file_ms else " " * 25
        start = f"{row.problem[:44]:44} {row.setting:8} {row.right}/{row.trials} {times}"
        with lock:
            rows.append(row)
            print(f"{start} {row.lines:4} lines {row.export_s:5} s {row.remark}", flush=True)
            if options.csv:
                write(options.csv, [replace(row, **where())])

    measured(options.checkout, work, options, keep)
    for setting in settings:
        gains = [row.speedup for row in rows if row.setting == setting and row.file_ms]
        if gains:
            mean = statistics.geometric_mean(gains)
            print(f"{setting}: {len(gains)} timed, geometric mean {mean:.2f}, least {min(gains):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
