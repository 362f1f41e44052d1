"""Shows the progress of a long call on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str], None]


@contextlib.contextmanager
def shown(progress: Progress | None) -> Iterator[Progress | None]:
    """`progress` itself, or a line on the terminal that disappears at the end; None without both."""
    if progress is not None or not sys.stderr.isatty():
        yield progress
        return
    from rich.console import Console

    with Console(stderr=True).status("postlude: capturing the model") as status:
        yield lambda what: status.update(f"postlude: {what}")
