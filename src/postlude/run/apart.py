"""Hides work from what surrounds it, a trace or hooks: planning, which traces programs of its own, and checking."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from postlude.stages.trace import without_saving_hooks as without_saving_hooks

T = TypeVar("T")


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """The function's result, computed in another thread, because tracing and autograd modes are per thread."""
    found: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found.append(function(*arguments))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="postlude")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]
