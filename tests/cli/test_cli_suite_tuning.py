"""torch.compile's measurements of problems that prepare side by side: one at a time, and nobody waits for ever."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from torch._inductor.runtime.benchmarking import benchmarker

from postlude.cli.suite_tuning import choices_in_turn


def _is_free(lock: Path) -> bool:
    with lock.open("a") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """What was free while something was measured."""
    found: list[bool] = []
    monkeypatch.setattr(benchmarker, "benchmark_gpu", lambda *_, **__: found.append(_is_free(tmp_path / "lock")))
    return found


def test_a_measurement_holds_the_lock_and_gives_it_back(tmp_path: Path, measured: list[bool]) -> None:
    lock = tmp_path / "lock"
    with choices_in_turn(lock):
        benchmarker.benchmark_gpu(lambda: None)
        assert measured == [False]
        assert _is_free(lock)
    benchmarker.benchmark_gpu(lambda: None)
    assert measured == [False, True]  # outside of it nothing is held: the check can tell


def test_whoever_has_the_turn_and_hangs_is_not_waited_for(tmp_path: Path, measured: list[bool]) -> None:
    lock = tmp_path / "lock"
    with lock.open("a") as other, choices_in_turn(lock, patience_s=0.1):
        fcntl.flock(other.fileno(), fcntl.LOCK_EX)
        benchmarker.benchmark_gpu(lambda: None)
    assert len(measured) == 1
