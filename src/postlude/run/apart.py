"""Hides work from what surrounds it, a trace or hooks: planning, which traces programs of its own, and checking."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


def without_saving_hooks() -> saved_tensors_hooks:
    """Hides what autograd saves inside from hooks that are set outside, such as those of a checkpoint, which counts."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


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
