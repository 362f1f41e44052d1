"""The one place where `bench` meets a stranger's file: a verdict on it, and its model to be timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from postlude.check.isolation import Candidate
from postlude.check.verdict import Verdict
from postlude.cli import judge
from postlude.cli.frame import Settings
from postlude.cli.session import Opened

WINDOW_LIMIT_S = 120.0  # for one window of timed calls


def verdict_on(settings: Settings, opened: Opened, path: Path, backward: bool = False) -> Verdict:
    """Is the file's ModelNew right? Nothing of it is timed before this says so."""
    return judge.judged_file(settings, opened, path, backward)


@contextmanager
def started(settings: Settings, opened: Opened, path: Path, state: dict[str, Tensor]) -> Iterator[Candidate]:
    """The file's ModelNew in a process of its own, with the state that every variant has."""
    with judge.started(settings, opened, path, WINDOW_LIMIT_S) as candidate:
        candidate.load_state(state)
        yield candidate
