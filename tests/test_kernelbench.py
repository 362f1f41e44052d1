"""benchmarks/kernelbench.py: problems prepared side by side and timed in turn; whatever fails is one row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

from postlude.check import records
from test_records import loaded

ROOT = Path(__file__).parents[1]

WORKER = """
import json, sys, time
log = open(sys.argv[1], "a", buffering=1)
for line in sys.stdin:
    task = json.loads(line)
    name = task["file"]
    if name == "dies":
        print("a last word", file=sys.stderr)
        sys.exit(3)
    for _ in range(1000 if name == "hangs" else 30):
        print(json.dumps(["working", name, time.monotonic()]), file=log)
        time.sleep(0.01)
    if name == "raises":
        print(json.dumps({"error": "ValueError: no"}), flush=True)
        continue
    if name.startswith("large") and task["rounds"] == 7:
        print(json.dumps({"error": "CUDA out of memory"}), flush=True)
        continue
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    time.sleep(0.15)
    print(json.dumps(["timed", name, start, time.monotonic()]), file=log)
    row = dict(chain=name, shape="", dtype="", layout="", precision="", mode="forward", variant="postlude", ms_p50=1.0)
    print(json.dumps({"rows": [row]}), flush=True)
"""

PROBLEM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        {first}
        return self.norm(torch.relu(self.conv(x)))


batch_size = 8
height, width = 12, 14


def get_inputs():
    return [torch.rand(batch_size, 8, height, width)]


def get_init_inputs():
    return [8, 16]
"""


@pytest.fixture(scope="module")
def problem() -> ModuleType:
    loaded("rows")
    return loaded("kernelbench_problem")


@pytest.fixture
def pool(problem: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = loaded("kernelbench_pool")
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(module, "COMMAND", [sys.executable, str(tmp_path / "worker.py"), str(tmp_path / "log")])
    return module


def answers(pool: ModuleType, problem: ModuleType, names: list[str], memory: int = 10, jobs: int = 3) -> dict[str, str]:
    """By name, why there is no row; nothing where there is one."""
    found: dict[str, str] = {}
    tasks = [(problem.Task(name), problem.Outline("", "", {}, 6 if name.startswith("large") else 2)) for name in names]
    pool.Pool(jobs, memory, 3.0, lambda answer: found.update({answer.task.file: answer.reason})).run(tasks)
    return found


def disturbed(path: Path) -> int:
    """How often another problem did something while one was timed."""
    said = [json.loads(line) for line in path.read_text().splitlines()]
    timed = [(name, start, end) for word, name, start, *rest in said if word == "timed" for end in rest]
    at_work = [(name, at) for word, name, at, *_ in said if word == "working"]
    both = sum(first < start < last for one, start, _ in timed for other, first, last in timed if one != other)
    return both + sum(start < at < end for name, start, end in timed for other, at in at_work if other != name)


def test_one_is_timed_while_the_others_are_stopped(
    pool: ModuleType, problem: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"problem {number}" for number in range(6)]
    assert answers(pool, problem, names) == dict.fromkeys(names, "")
    assert disturbed(tmp_path / "log") == 0
    monkeypatch.setattr(pool.Worker, "stop", lambda self: None)  # the mutant
    (tmp_path / "log").unlink()
    answers(pool, problem, names)
    assert disturbed(tmp_path / "log") > 0


def test_what_fails_stops_nobody(pool: ModuleType, problem: ModuleType) -> None:
    found = answers(pool, problem, ["dies", "first", "hangs", "raises", "second"])
    assert found.pop("first") == found.pop("second") == ""
    assert found["raises"] == "ValueError: no"
    assert found["dies"] == "its process ended; it said last: a last word"
    assert found["hangs"] == "it took longer than 3 s and was ended"


def test_memory_bounds_what_is_prepared_together(pool: ModuleType, problem: ModuleType, tmp_path: Path) -> None:
    """Two that need six of ten are never there together; what lacked memory is tried once more alone, and told."""
    found = answers(pool, problem, ["large 1", "large 2", "small"])
    assert found == {"large 1": "CUDA out of memory", "large 2": "CUDA out of memory", "small": ""}
    said = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    spans = {}
    for word, name, start, *_ in said:
        if word == "working":
            spans.setdefault(name, []).append(start)
    first, second = (sorted(spans[name])[:30] for name in ("large 1", "large 2"))
    assert first[-1] < second[0] or second[-1] < first[0]
    assert len(spans["large 1"]) == 60  # twice


def test_problems_on_this_machine(problem: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "problems"
    folder.mkdir()
    for name, first in (("1_Conv2d_ReLU", "pass"), ("2_Conv2d_raises", "raise ValueError('no such thing')")):
        (folder / f"{name}.py").write_text(PROBLEM.format(first=first))
    path = tmp_path / "rows.csv"
    script, options = ROOT / "benchmarks" / "kernelbench.py", "--device cpu --precision fp32 --rounds 2"
    command = [sys.executable, str(script), str(folder), *options.split(), "--csv", str(path)]
    command += ["--modes", "forward", "train", "--variants", "eager", "postlude"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "2_Conv2d_raises" in done.stdout
    assert "failed: ValueError: no such thing" in done.stdout
    rows = records.read(path)
    assert {(row.chain[0], row.mode, row.variant) for row in rows} == {
        *(("1", mode, variant) for mode in ("forward", "training step") for variant in ("eager", "postlude")),
        *(("2", mode, "postlude") for mode in ("forward", "training step")),
    }
    assert all(row.ms_p50 for row in rows if row.chain[0] == "1")
    assert {row.verdict for row in rows if row.chain[0] == "2"} == {"failed"}


def _bench() -> ModuleType:
    for name in ("rows", "kernelbench_table", "kernelbench_pool"):  # which it imports
        loaded(name)
    return loaded("kernelbench")


def test_a_row_counts_as_long_as_its_code_is_the_same(problem: ModuleType, tmp_path: Path) -> None:
    bench = _bench()
    (tmp_path / "1_Conv2d.py").write_text(PROBLEM.format(first="pass"))
    task = problem.Task(str(tmp_path / "1_Conv2d.py"), ("forward", "train"), ("eager", "postlude"), device="cpu")
    outline = problem.outline_of(task)
    assert outline.shape == "8×8×12×14"
    row = records.Record(**{**problem.row_of(task, "forward", "eager", outline), "ms_p50": 1.0})
    known = [row, replace(row, variant="postlude")]
    assert bench.is_recorded(task, "forward", known, outline.shape)
    assert not bench.is_recorded(task, "train", known, outline.shape)
    assert not bench.is_recorded(task, "forward", known[:1], outline.shape)
    assert not bench.is_recorded(task, "forward", [row, replace(known[1], kernel_hash="other")], outline.shape)
    assert not bench.is_recorded(replace(task, shapes="other"), "forward", known, outline.shape)
    failed = replace(known[1], ms_p50=None, verdict="failed", reason="no memory")
    assert not bench.is_recorded(task, "forward", [row, failed], outline.shape)
    assert [asdict(one)["modes"] for one, _ in bench.outlined([task], known, lambda _: None)] == [("train",)]


def test_linear_layers_are_strict_with_pytorchs_defaults(problem: ModuleType, tmp_path: Path) -> None:
    """Their rows in strict fp32 count for both, in the table and when a run goes on."""
    bench, table = _bench(), loaded("kernelbench_table")
    names = ("9_Matmul_Subtract", "1_Conv2D_ReLU")
    assert [table.measured_as(name, "auto") for name in names] == ["fp32", "auto"]
    assert table.measured_as(names[0], "tf32") == "tf32"
    task = problem.Task(f"{tmp_path}/{names[0]}.py", ("forward",), ("eager", "postlude"), "auto", "own", 7, "cuda")
    code = records.kernel_hash(task.sources("forward"))
    about = {"shape": "8×8", "dtype": "float32", "layout": "", "ms_p50": 1.0, "kernel_hash": code, "mode": "forward"}
    about["malloc"] = "default"
    rows = [
        records.Record(name, precision=precision, variant=variant, **about)
        for name, precision in ((names[0], "fp32"), (names[1], "fp32"), (names[1], "auto"))
        for variant in ("eager", "torch.compile", "postlude")
    ]
    assert bench.is_recorded(task, "forward", rows, "8×8")
    records.update(tmp_path / "rows.csv", rows)
    found = table.known("forward", tmp_path / "rows.csv")
    assert {name: [case.ours.chain for case in each] for name, each in found.items()} == {
        "auto": [names[1], names[0]],
        "fp32": [names[1], names[0]],
    }


def test_with_pytorchs_defaults_linear_layers_are_recorded_once(
    problem: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As strict fp32, which their old rows are: their row of the defaults would be beside it in the table."""
    bench, asked = _bench(), []
    for name in ("1_Conv2d_ReLU", "9_Matmul_Subtract"):
        (tmp_path / f"{name}.py").write_text(PROBLEM.format(first="pass"))
    monkeypatch.setattr(bench, "Pool", lambda *_: type("Pool", (), {"run": lambda _, tasks: asked.extend(tasks)})())
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--precision", "auto", "--device", "cpu"])
    assert bench.main() == 0
    assert {task.name: task.precision for task, _ in asked} == {"1_Conv2d_ReLU": "auto", "9_Matmul_Subtract": "fp32"}


def test_the_floor_is_of_compulsory_bytes_and_operations(problem: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "1_Conv2d.py").write_text(PROBLEM.format(first="pass"))
    task = problem.Task(str(tmp_path / "1_Conv2d.py"), ("forward", "train"))
    work = problem.outline_of(task).work
    weights, inputs, result = 16 * 8 * 9 + 3 * 16, 8 * 8 * 12 * 14, 8 * 16 * 10 * 12
    assert work["forward"].bytes == 4 * (weights + inputs + result)
    assert work["forward"].operations == 2 * 8 * 10 * 12 * 16 * 8 * 9
    assert work["train"].bytes == 4 * (3 * (weights + inputs) + 2 * result)
    assert work["train"].operations == 3 * work["forward"].operations
    other = problem.outline_of(replace(task, shapes="other"))
    assert other.shape == "5×8×11×13"


STOPPED = """
import os, signal, kernelbench_pool
worker = kernelbench_pool.Worker({})
worker.say({"file": "none.py"})
worker.hear()
worker.stop()
print(worker.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux ends the children of a process that ends")
def test_workers_end_with_who_started_them() -> None:
    """Those that are stopped too, which would hold the card's memory."""
    command = [sys.executable, "-c", STOPPED]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", stdout=subprocess.PIPE, check=False)
    number, until = int(done.stdout), time.monotonic() + 10
    while _runs(number) and time.monotonic() < until:
        time.sleep(0.1)
    if _runs(number):
        os.kill(number, signal.SIGKILL)
        pytest.fail("it outlived its parent")


def _runs(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


HARNESS = """
import json, os, sys, time
for problem, file, setting in json.loads(sys.argv[sys.argv.index("--evaluate") + 1]):
    name = os.path.basename(problem).removesuffix(".py")
    if name == "4_dies":
        os.abort()
    if name == "5_hangs":
        time.sleep(300)
    timed = sys.argv[sys.argv.index("--trials") + 1] == "0"
    right = 4 if name == "3_wrong" else 0 if timed else 5
    times = dict(reference_ms=2.0, file_ms=1.0) if timed else dict(reference_ms=0.0, file_ms=0.0)
    print("ANSWER", json.dumps(dict(problem=name, setting=setting, right=right, remark="", **times)), flush=True)
    if name == "1_spoils":
        break  # as where the card has an error
"""


def test_a_file_that_ends_kernelbenchs_process_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one that hangs; the others are tried in another process, and what is right is timed."""
    harness = loaded("kernelbench_harness")
    names = ["1_spoils", "2_right", "3_wrong", "4_dies", "5_hangs", "6_right"]
    (tmp_path / "child.py").write_text(HARNESS)
    (tmp_path / "KernelBench" / "level2").mkdir(parents=True)
    for name in names:
        (tmp_path / "KernelBench" / "level2" / f"{name}.py").touch()
        (tmp_path / f"{name}-strict.py").write_text("a file that is there")
    monkeypatch.setattr(harness, "__file__", str(tmp_path / "child.py"))
    rows = tmp_path / "rows.csv"
    asked = [str(tmp_path), "--setting", "strict", "--files", str(tmp_path), "--limit", "5", "--csv", str(rows)]
    monkeypatch.setattr(sys, "argv", ["", *asked, "--jobs", "2", "--missing"])
    assert harness.main() == 0
    found = {row.problem: (row.right, row.file_ms, row.remark) for row in harness.read(rows)}
    ended = "KernelBench's process ended with"
    assert found == {
        **dict.fromkeys(("1_spoils", "2_right", "6_right"), (5, 1.0, "")),
        "3_wrong": (4, 0.0, ""),
        "4_dies": (0, 0.0, f"{ended} -6"),
        "5_hangs": (0, 0.0, f"{ended} -9"),
    }
    monkeypatch.setattr(harness, "measured", lambda checkout, work, *_: work == [] or pytest.fail("again"))
    assert harness.main() == 0
