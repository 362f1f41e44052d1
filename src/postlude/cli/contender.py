"""The one place where `bench` meets a stranger's file: a verdict on it, and its model to be timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from postlude import problem_file
from postlude.check.isolation import Candidate, Limits
from postlude.check.verdict import Verdict
from postlude.cli.frame import Settings
from postlude.cli.judge import judged_candidate
from postlude.cli.session import Opened

WINDOW_LIMIT_S = 120.0  # for one window of timed calls


def verdict_on(settings: Settings, opened: Opened, path: Path, backward: bool = False) -> Verdict:
    """Is the file's ModelNew right? Nothing of it is timed before this says so."""
    return judged_candidate(settings, opened, problem_file.load(path, "ModelNew"), backward)[1]


@contextmanager
def started(settings: Settings, opened: Opened, path: Path, state: dict[str, Tensor]) -> Iterator[Candidate]:
    """The file's ModelNew in a process of its own, with the state that every variant has."""
    args, kwargs = opened.problem.init_arguments()
    size = opened.output.numel() * opened.output.element_size()
    limits = Limits(call_s=WINDOW_LIMIT_S, output_bytes=max(1 << 30, 2 * size))
    with Candidate(path, args, kwargs, device=settings.device, limits=limits) as candidate:
        candidate.load_state(state)
        yield candidate
