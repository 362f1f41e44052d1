"""Hides work from what surrounds it, a trace, hooks or other threads: planning, which traces programs of its own, and
checking."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from postlude.stages.trace import without_saving_hooks as without_saving_hooks

T = TypeVar("T")


def tracing_alone() -> contextlib.AbstractContextManager[Any]:
    """Waits until no other thread traces or compiles. PyTorch's tracer replaces `nn.Module.__call__` meanwhile, and two
    that overlap would leave it replaced. Taken before the lock of a ledger, as Dynamo takes it."""
    from torch._dynamo import convert_frame

    return getattr(convert_frame, "compile_lock", _TRACING)


_TRACING = threading.RLock()


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
