"""Turns emitted text into Triton jit functions, once per text and process."""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import Any

HEADER = "import triton\nimport triton.language as tl\n\n\n"


@functools.lru_cache(maxsize=1024)
def compose(text: str) -> dict[str, Any]:
    """Executes emitted text with the device functions in its namespace.

    Triton reads a function's source from its file. This one has no file, so linecache holds the text under a name made
    from it, where tracebacks and profilers find it as well.
    """
    from postlude.kernels.triton import channels, derivatives, moments, pointwise, pools, row_derivatives, rows

    name = f"<postlude {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "postlude.emitted"}
    for module in (pointwise, derivatives, moments, channels, pools, rows, row_derivatives):
        words = vars(module).items()
        namespace.update(
            (key, value) for key, value in words if not key.startswith("_") and not key.endswith("_kernel")
        )
    exec(compile(text, name, "exec"), namespace)
    return namespace
