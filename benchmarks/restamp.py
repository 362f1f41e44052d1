"""Keeps results whose programs a change has left as they were, so that only the others read "changed".

A result's hash covers all planning, stages and kernels. This compares, with the tree of a commit, the programs that
each result timed: every call with its grid, buffers and constants, and what its kernels do. Where they are equal, the
result gets today's hash. It needs no GPU: plans for an H200 are made anywhere. What launches a program (run/) is not
compared, so a change there must be measured.

python benchmarks/restamp.py KERNELBENCH/level2 --since COMMIT

A kernel that says the same in other words is named after --compiled: its PTX is compared, not its source. The installed
Triton compiles it, so that must be the one that the results are from.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import BENCHES, TRAINED, Bench
from kernelbench_problem import MODES
from rows import GPU_RESULTS, GPU_SOURCES, KERNELBENCH_RESULTS, ROOT, TRAINING_SOURCES

from kernels import offline
from postlude import problem_file
from postlude.check import records, tensors_for
from postlude.check.records import Record
from postlude.code_hash import kernel_hash
from postlude.errors import PostludeError
from postlude.export.cuda import cuda_text
from postlude.export.export_model import HOPPER, export
from postlude.plan import Plan, Problem, lower
from postlude.plan.problem import spec_of
from postlude.plan.program import Call, CudaCall, KernelCall
from postlude.run.launch import launch_of
from postlude.stages.program import Given, training_program
from tracing import compiled as compiled_call


def main(folder: Path, precisions: Sequence[str], compiled: Sequence[str], since: str) -> None:
    now = fingerprints(folder, precisions, compiled)
    with tempfile.TemporaryDirectory() as place:
        command = ["git", "-C", str(ROOT), "worktree", "add", "--detach", "--force", place, since]
        subprocess.run(command, check=True, capture_output=True)
        try:
            then = _of_another_tree(folder, precisions, compiled, Path(place))
            hashes = _hashes_of_another_tree(Path(place))
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", place], check=True)
    for path in (GPU_RESULTS, KERNELBENCH_RESULTS):
        rows = [_restamped(row, now, then, hashes) for row in records.read(path)]
        changed = sorted({row.chain for row in rows if _key(row) in now and now[_key(row)] != then.get(_key(row))})
        records.write(path, rows)
        print(f"{path.name}: {len(changed)} problems have other programs{': ' * bool(changed)}{', '.join(changed)}")


def _restamped(row: Record, now: dict[str, str], then: dict[str, str], hashes: dict[bool, str]) -> Record:
    trains = row.mode.startswith("training")
    is_same = _key(row) in now and now[_key(row)] == then.get(_key(row))
    if row.kernel_hash != hashes[trains] or not is_same:
        return row
    return dataclasses.replace(row, kernel_hash=kernel_hash(TRAINING_SOURCES if trains else GPU_SOURCES))


def _hashes_of_another_tree(root: Path) -> dict[bool, str]:
    """By whether training is timed, of the files that the tree itself lists: some may have other names today."""
    sources = "kernel_hash(rows.GPU_SOURCES), kernel_hash(rows.TRAINING_SOURCES)"
    code = f"import rows; from postlude.code_hash import kernel_hash; print({sources})"
    paths = os.pathsep.join(str(root / part) for part in ("src", "tests", "benchmarks"))
    command = [sys.executable, "-c", code]
    made = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    return dict(zip((False, True), made.stdout.split(), strict=True))


def _of_another_tree(folder: Path, precisions: Sequence[str], compiled: Sequence[str], root: Path) -> dict[str, str]:
    """The fingerprints by that tree's own script, because names in the package may have changed since."""
    paths = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
    script = root / Path(__file__).resolve().relative_to(ROOT)
    command = [sys.executable, str(script), str(folder.resolve()), "--precisions", *precisions]
    command += ["--compiled", *compiled] if compiled else []  # which older trees do not know
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths})
    return dict(json.loads(made.stdout))


def _key(row: Record) -> str:
    return " | ".join((row.chain, row.shape, row.dtype, row.layout, row.precision, row.mode))


def fingerprints(folder: Path, precisions: Sequence[str], compiled: Sequence[str] = ()) -> dict[str, str]:
    """Of the programs of every result that can be planned here."""
    found = {}
    for bench, trains in [*((bench, False) for bench in BENCHES), *((bench, True) for bench in TRAINED)]:
        mode = "forward" if not trains else f"training step{', input frozen' * bench.frozen_input}"
        shape, dtype = "×".join(map(str, bench.shape)), str(bench.dtype).removeprefix("torch.")
        key = " | ".join((str(bench.chain), shape, dtype, bench.layout, bench.precision, mode))
        found[key] = _digest([_calls_of_bench(bench, trains)], compiled)
    files = sorted(folder.glob("*.py"))
    for number, file in enumerate(files, 1):
        print(f"{number} of {len(files)}: {file.stem}", file=sys.stderr)
        for trains in (False, True):
            for precision in precisions:
                shape, calls = _calls_of_file(file, trains, precision)
                key = (file.stem, shape, "float32", "contiguous", precision, MODES["train" if trains else "forward"])
                found[" | ".join(key)] = _digest(calls, compiled)
    return found


def _calls_of_bench(bench: Bench, trains: bool) -> Sequence[Call] | str:
    small = (1, bench.shape[1], *[4] * bench.chain.dims)
    tensors = tensors_for(bench.chain, small, bench.dtype, "cpu", 0, "normal", bench.layout)
    first, *others = map(spec_of, tensors)
    specs = (dataclasses.replace(first, shape=bench.shape, layout=bench.layout), *others)  # type: ignore[arg-type]
    problem = Problem(specs, "cuda", bench.precision, trains, bench.precision == "tf32")
    plan = lower(bench.chain, problem, HOPPER)
    if not isinstance(plan, Plan):
        return "PyTorch's"  # for whatever reason
    if not bench.frozen_input:
        return (*plan.program.forward, *plan.program.backward)
    given: Given = tuple((b.shape, b.strides, getattr(torch, b.dtype)) for b in plan.program.given)
    program = training_program(plan, given, tuple(slot > 0 for slot in range(len(given))))
    return (*program.forward, *program.backward)


def _calls_of_file(file: Path, trains: bool, precision: str) -> tuple[str, list[Sequence[Call] | str]]:
    with torch.device("meta"):
        problem = problem_file.load(file)
        model, inputs = problem.build("meta"), problem.inputs("meta")
    how = {"precision": precision, "allows_tf32": precision == "tf32", "training": trains}
    try:
        made = export(file.read_text("utf-8"), model, inputs, problem.init_arguments(), **how)  # type: ignore[arg-type]
        programs = [chain.plan.program for chain in made.chains]
    except PostludeError:  # nothing to fuse
        programs = []
    shape = " ".join("×".join(map(str, x.shape)) for x in inputs if isinstance(x, torch.Tensor))
    return shape, [(*program.forward, *program.backward) for program in programs]


def _digest(programs: Iterable[Sequence[Call] | str], compiled: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for calls in programs:
        digest.update(repr(calls).encode())
        for call in calls if not isinstance(calls, str) else ():
            digest.update("\n".join(_code_of(call, compiled)).encode())
    return digest.hexdigest()


def _code_of(call: Call, compiled: Sequence[str]) -> Iterator[str]:
    """What the kernel of a call does, and every device function that it calls."""
    if isinstance(call, CudaCall):
        yield cuda_text(call)
    if isinstance(call, KernelCall) and call.kernel in compiled:
        yield _instructions(call)
    elif isinstance(call, KernelCall):
        launch, seen = launch_of(call), set[str]()
        for function in (launch.kernel, *launch.constants.values()):
            yield from _reached(function, seen)


_INSTRUCTIONS: dict[str, str] = {}  # by call


def _instructions(call: KernelCall) -> str:
    """The PTX for an H200, without what says where in the source it is from."""
    if repr(call) not in _INSTRUCTIONS:
        with pytest.MonkeyPatch.context() as patch:
            offline.use_card(patch, 90)
            ptx: str = compiled_call(call)[1].asm["ptx"]
        code, *_ = re.split(r"^\s*\.section\s+\.debug", ptx, flags=re.MULTILINE)
        code = re.sub(r"//.*|^\s*\.(loc|file)\b.*|^\$L__(tmp|func|info)\w*:", "", code, flags=re.MULTILINE)
        _INSTRUCTIONS[repr(call)] = "\n".join(line.strip() for line in code.splitlines() if line.strip())
    return _INSTRUCTIONS[repr(call)]


def _reached(function: Any, seen: set[str]) -> Iterator[str]:
    if not hasattr(function, "fn") or function.fn.__qualname__ in seen:
        return
    seen.add(function.fn.__qualname__)
    tree = ast.parse(function.src)
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    yield ast.dump(ast.Module(definition.body[ast.get_docstring(definition) is not None :], []))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in sorted(names & function.fn.__globals__.keys()):
        value = function.fn.__globals__[name]
        yield f"{name} = {value!r}" if isinstance(value, int | float) else ""
        yield from _reached(value, seen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of KernelBench's level 2")
    parser.add_argument("--since", metavar="COMMIT", help="whose programs are compared; without it, print fingerprints")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "tf32"], choices=["fp32", "tf32"])
    parser.add_argument("--compiled", nargs="+", default=[], metavar="KERNEL", help="kernels whose PTX is compared")
    asked = parser.parse_args()
    if asked.since:
        main(asked.folder, asked.precisions, asked.compiled, asked.since)
    else:
        print(json.dumps(fingerprints(asked.folder, asked.precisions, asked.compiled)))
