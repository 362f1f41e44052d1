"""Launches taken down instead of made, so that a plan can be asked what it runs before any of it does.

A plan is called on tensors of the meta device, which have shapes and no memory, while a recording is active. `ahead.py`
compiles what was taken down, `record.py` makes plain data of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from postlude.run.launch import Launch


class Recording:
    def kernel(self, launch: Launch, tensors: tuple[Any, ...]) -> None:
        """A kernel of kernels/triton with its pointers and descriptors."""
        raise NotImplementedError

    def cuda(self, source: str, kernel: str, ready: Any, tensors: tuple[Tensor | None, ...]) -> None:
        """One of kernels/cuda; `ready` knows its macros and numbers, and loads it."""
        raise NotImplementedError


class _Recording(threading.local):
    active: Recording | None = None  # in this thread; None where launches are made


recording = _Recording()


@contextlib.contextmanager
def recorded_by(taker: Recording) -> Iterator[None]:
    before, recording.active = recording.active, taker
    try:
        yield
    finally:
        recording.active = before
