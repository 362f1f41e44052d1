"""Candidates' processes that serve one candidate after another: starting one takes two seconds, torch's import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from postlude.check.isolation import candidate
from postlude.check.isolation.process import CLOSED, Limits, Running


class Kept(Running):
    """Stays when its candidate is done with it; one that failed in any way ends as it always does."""

    idle: list[Kept] = []  # noqa: RUF012 - of all of them

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.use = _use(limits)

    def close(self, why: str = CLOSED) -> None:
        if why == CLOSED and self.ending is None and self._code_now() is None:
            self.idle.append(self)
        else:
            super().close(why)


def _use(limits: Limits) -> tuple[object, ...]:
    """What is settled when a process starts; times are per request."""
    return limits.file_bytes, limits.said_bytes, os.environ.get("OMP_NUM_THREADS")


def lent(limits: Limits) -> Kept:
    for running in Kept.idle:
        if running.use == _use(limits):
            Kept.idle.remove(running)
            running.limits = limits
            return running
    return Kept(limits)


@contextmanager
def kept_processes() -> Iterator[None]:
    """From now on tame candidates share processes, which tests of the isolation itself must not do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidate, "Running", lent)
        yield
    while Kept.idle:
        Running.close(Kept.idle.pop())
