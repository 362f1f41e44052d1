"""Launches listed instead of made, so that a plan can be asked which kernels it needs before any of them runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class _Collecting(threading.local):
    launches: list[Any] | None = None  # of this thread, with their arguments; None where launches are made


collecting = _Collecting()


@contextlib.contextmanager
def collected() -> Iterator[list[Any]]:
    """This thread's launches while it is open. A plan is called on tensors of the meta device here."""
    before, collecting.launches = collecting.launches, []
    try:
        yield collecting.launches
    finally:
        collecting.launches = before
