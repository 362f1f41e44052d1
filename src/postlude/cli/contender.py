"""A candidate's file in `bench`: its verdict, and its model to be timed."""

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
    """The verdict on the file's ModelNew, which is not timed unless this says right."""
    return judge.judged_file(settings, opened, path, backward)


@contextmanager
def started(settings: Settings, opened: Opened, path: Path, state: dict[str, Tensor]) -> Iterator[Candidate]:
    """The file's ModelNew in a separate process, with the state that all variants have."""
    with judge.started(settings, opened, path, WINDOW_LIMIT_S) as candidate:
        candidate.load_state(state)
        yield candidate
