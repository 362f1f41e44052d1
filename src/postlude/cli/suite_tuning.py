"""Keeps two problems from autotuning at once: torch.compile measures its kernels to choose among them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 60.0  # then it measures without the lock, because its holder may hang
PAUSE_S = 0.01


@contextlib.contextmanager
def choices_in_turn(lock: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """A context in which this process measures a kernel on the card only while it holds `lock`."""
    from torch._inductor.runtime.benchmarking import benchmarker  # every choice of torch.compile's goes through it

    measure = benchmarker.benchmark_gpu
    benchmarker.benchmark_gpu = _in_turn(measure, lock, patience_s)  # type: ignore[method-assign]
    try:
        yield
    finally:
        benchmarker.benchmark_gpu = measure  # type: ignore[method-assign]


def _in_turn(function: Callable[..., T], lock: Path, patience_s: float) -> Callable[..., T]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        with lock.open("a") as file:  # closing it, or the end of the process, gives the lock back
            _acquire(file.fileno(), patience_s)
            return function(*args, **kwargs)

    return call


def _acquire(descriptor: int, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(PAUSE_S)
