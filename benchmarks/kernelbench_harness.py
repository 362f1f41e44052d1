"""Runs exported files in KernelBench's own harness: its construction, its correctness trials, its timing, on a GPU.

python benchmarks/kernelbench_harness.py CHECKOUT --csv benchmarks/results/h200-kernelbench-harness.csv
python benchmarks/kernelbench_harness.py CHECKOUT --only 23,61 --setting strict
python benchmarks/kernelbench_harness.py CHECKOUT --static

CHECKOUT is a clone of KernelBench. Each problem of its level 2 is exported by `postlude optimize FILE -o OUT` and
handed to `eval_kernel_against_ref`, as KernelBench hands over a model's answer. There are two settings:

strict    TF32 is off, files are written with `--precision fp32`
default   PyTorch's switches as they are (its convolutions compute in TF32), files with `--convolution pytorch`

Files are exported and tried by `--jobs` processes at a time. One process then times them, one after the other. Modules
that KernelBench imports for other purposes (its clients of language models) are stood in for where they are missing.
`--static` needs no GPU: KernelBench's static checker, which looks for cheating in a file's text, reads all files.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from postlude.check import records

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
    command = [sys.executable, "-m", "postlude", "optimize", str(problem), "-o", str(target)]
    start = time.perf_counter()
    done = subprocess.run([*command, *SETTINGS[setting], *more], capture_output=True, text=True, check=False)
    row = Row(problem.stem, setting, export_s=round(time.perf_counter() - start, 1))
    if done.returncode or not target.exists():
        said = (done.stderr or done.stdout).strip().splitlines()
        return replace(row, remark=" ".join(said[-1:])[:200] or f"exit code {done.returncode}"), None
    return replace(row, lines=len(target.read_text("utf-8").splitlines())), target


def tried(checkout: Path, jobs: Sequence[tuple[Path, Path, str]], trials: int, timings: int) -> list[dict[str, Any]]:
    """What KernelBench says of these files, from a process of its own."""
    if not jobs:
        return []
    work = json.dumps([[str(problem), str(file), setting] for problem, file, setting in jobs])
    options = ["--evaluate", work, "--trials", str(trials), "--timings", str(timings)]
    command = [sys.executable, __file__, str(checkout), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return [json.loads(line.removeprefix("ANSWER ")) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]


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
        found = dict(result.metadata)
        passed = str(found.get("correctness_trials", "(0 / 0)")).strip("()").split("/")[0]
        answer = {
            "problem": Path(problem).stem,
            "setting": setting,
            "right": int(passed),
            "reference_ms": float(result.ref_runtime),
            "file_ms": float(result.runtime),
            "remark": "; ".join(f"{key}: {found[key]}" for key in found if "error" in key or "diff" in key)[:200],
        }
        print(f"ANSWER {json.dumps(answer)}", flush=True)


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
    checkout: Path, problems: Sequence[Path], settings: Sequence[str], options: argparse.Namespace
) -> list[Row]:
    """Exports, tries and times, and prints each row as it is there."""
    rows: dict[tuple[str, str], Row] = {}
    folder = Path(options.files or tempfile.mkdtemp(prefix="postlude-kernelbench-"))
    folder.mkdir(parents=True, exist_ok=True)
    files: list[tuple[Path, Path, str]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        work = [(problem, setting) for problem in problems for setting in settings]
        more = ["--device", "cuda", *(["--no-verify"] if options.no_verify else [])]
        for (problem, setting), (row, file) in zip(work, pool.map(lambda job: exported(*job, folder, *more), work)):
            rows[problem.stem, setting] = row
            if file is None:
                print(f"{problem.stem[:50]:50} {setting:8} no file: {row.remark}", flush=True)
            else:
                files.append((problem, file, setting))
        shares = [files[number :: options.jobs] for number in range(options.jobs)]
        answers = pool.map(lambda share: tried(checkout, share, TRIALS, 0), shares)
        for answer in (one for share in answers for one in share):
            place = answer["problem"], answer["setting"]
            rows[place] = replace(rows[place], right=answer["right"], remark=answer["remark"])
    right = [job for job in files if rows[job[0].stem, job[2]].right == TRIALS]
    for answer in tried(checkout, right, 0, options.timings):
        place = answer["problem"], answer["setting"]
        rows[place] = replace(rows[place], **{name: answer[name] for name in ("reference_ms", "file_ms")})
    return [replace(row, **where()) for row in rows.values() if row.lines]


def read_by_checker(checkout: Path, problems: Sequence[Path], settings: Sequence[str], jobs: int) -> int:
    """Prints what KernelBench's static checker says of each file; the number of files that it refuses."""
    path = checkout / "src" / "kernelbench" / "kernel_static_checker.py"  # importing its package patches torch
    spec = importlib.util.spec_from_file_location("kernel_static_checker", path)
    assert spec is not None
    assert spec.loader is not None
    checker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checker)
    work = [(problem, setting) for problem in problems for setting in settings]
    refused = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        made = pool.map(lambda job: exported(*job, Path(folder), "--no-verify"), work)
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
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in kept.values())


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
    parser.add_argument("--files", help="keep the exported files in this folder")
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
    if options.static:
        return int(read_by_checker(options.checkout, problems, settings, options.jobs) > 0)
    rows = measured(options.checkout, problems, settings, options)
    if options.csv:
        write(options.csv, rows)
    for row in rows:
        times = f"{row.reference_ms:8.3f} {row.file_ms:8.3f} {row.speedup:6.2f}x" if row.file_ms else " " * 25
        start = f"{row.problem[:44]:44} {row.setting:8} {row.right}/{row.trials} {times}"
        print(f"{start} {row.lines:4} lines {row.export_s:5} s {row.remark}")
    for setting in settings:
        gains = [row.speedup for row in rows if row.setting == setting and row.file_ms]
        if gains:
            mean = statistics.geometric_mean(gains)
            print(f"{setting}: {len(gains)} timed, geometric mean {mean:.2f}, least {min(gains):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
