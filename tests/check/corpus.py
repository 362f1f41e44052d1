"""The files of tests/corpus: what each says about itself, and the verdict on it over the real, isolated path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

import postlude.problems
from postlude import problem_file
from postlude.check.exam import Exam, IsolatedSide, Rules, examine
from postlude.check.isolation import Candidate, CandidateFailed, Limits
from postlude.check.verdict import Verdict

FOLDER = Path(__file__).parent.parent / "corpus"
PROBLEMS = Path(postlude.problems.__file__).parent
# The named problems, as small as every test of them still makes sense.
SIZES = {
    "conv3d_group_norm_mean": {"batch_size": 9, "depth": 6, "height": 7, "width": 8},
    "conv_transpose3d_relu_group_norm": {
        "batch_size": 3,
        "in_channels": 6,
        "out_channels": 16,
        "depth": 5,
        "height": 6,
        "width": 7,
    },
}
PRECISIONS = {"cpu": "auto", "cuda": "fp32"}  # "auto" is TF32 on a card, whose own error hides a cancellation
LIMITS = Limits(start_s=60, call_s=20, grace_s=0.2, output_bytes=64 << 20)


@dataclass(frozen=True)
class Entry:
    """One file; its docstring says what it does, for which reference, and what it needs."""

    path: Path
    reference: str
    backward: bool
    alone: bool  # tampers with its process, so that nothing else may run there
    interpreted: bool
    timeout: float

    @property
    def name(self) -> str:
        return self.path.stem


def entries(folder: str) -> list[Entry]:
    return [_entry(path) for path in sorted((FOLDER / folder).glob("*.py"))]


def _entry(path: Path) -> Entry:
    docstring = path.read_text(encoding="utf-8").split('"""')[1]
    said = dict(re.findall(r"^([A-Z][a-z ]+): (\S+)$", docstring, re.MULTILINE))
    reference = said.get("Attacks") or said["Stands in for"]
    flags = [said.get(word) == "yes" for word in ("Backward", "Alone", "Interpreted")]
    return Entry(path, reference, *flags, float(said.get("Timeout", LIMITS.call_s)))


@dataclass(frozen=True)
class Problem:
    model: nn.Module
    arguments: tuple[list[Any], dict[str, Any]]
    exam: Exam


@cache
def problem(name: str, backward: bool = False, device: str = "cpu") -> Problem:
    """The reference with its right answers, which all candidates for it share."""
    if name in SIZES:
        file = problem_file.load(PROBLEMS / f"{name}.py").with_sizes(**SIZES[name])
    else:
        file = problem_file.load(FOLDER / "references" / f"{name}.py")
    model = file.build(device)
    exam = Exam(model, file.inputs(device), Rules(PRECISIONS[device], backward=backward, seed=11), remember=True)
    return Problem(model, file.init_arguments(), exam)


def verdict_on(entry: Entry, candidate: Candidate | None = None, device: str = "cpu") -> Verdict:
    """In a process of its own, or in one that a tame file before it left running."""
    asked = problem(entry.reference, entry.backward, device)
    try:
        if candidate is not None:
            restart(candidate, entry, asked)
            return examine(asked.exam, IsolatedSide(candidate, asked.model))
        with started(entry, device) as fresh:
            return examine(asked.exam, IsolatedSide(fresh, asked.model))
    except CandidateFailed as error:
        return Verdict("wrong", (str(error),))


def started(entry: Entry, device: str = "cpu") -> Candidate:
    args, kwargs = problem(entry.reference, entry.backward, device).arguments
    limits = Limits(LIMITS.start_s, entry.timeout, LIMITS.grace_s, LIMITS.output_bytes)
    given = {"device": device, "precision": PRECISIONS[device]}
    return Candidate(entry.path, args, kwargs, limits=limits, poisoned=True, **given)


def restart(candidate: Candidate, entry: Entry, asked: Problem) -> None:
    """Another tame file in the same process: starting one takes a second, most of it torch's import."""
    copied = candidate._running.copy_in(entry.path)
    args, kwargs = asked.arguments
    start = {"path": str(copied), "device": "cpu", "precision": "auto", "args": args, "kwargs": kwargs}
    candidate._ask("start", start, "its start", LIMITS.start_s)


def verdicts(together: list[Entry]) -> Iterator[tuple[Entry, Verdict]]:
    """Of tame files, one process for all; it is started again where one of them ended it."""
    candidate: Candidate | None = None
    try:
        for entry in together:
            if candidate is None or not candidate.alive:
                candidate = started(entry)
            yield entry, verdict_on(entry, candidate)
    finally:
        if candidate is not None:
            candidate.close()
