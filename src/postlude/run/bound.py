"""A compiled Triton kernel with everything bound but its pointers: a launch is one call of Triton's C launcher.

Triton 3.6 spends 10 to 20 µs of Python on a launch, and 4 µs on each descriptor: it makes the tensor map anew although
that depends only on the address. We cache maps by address. A version of Triton that `triton_versions` does not know
uses its own launch path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from postlude.run.triton_versions import Version, version

Bound = Callable[..., None]  # takes the stream, then pointers as integers, descriptors and numbers
_REMEMBERED = 256  # addresses of a descriptor before the cache is cleared


def bound(compiled: Any, grid: tuple[int, ...], after: tuple[Any, ...]) -> Bound | None:
    """A function that launches a compiled kernel; None if the launch needs more than pointers and numbers.

    `after` are the numbers and constants after the pointers.
    """
    known, run = version(), compiled.run
    scratch = getattr(run, "global_scratch_size", 1) + getattr(run, "profile_scratch_size", 1)
    if known is None or scratch or getattr(run, "gsan_enabled", False):  # a sanitizer adds arguments
        return None
    is_descriptor = [str(kind).startswith("tensordesc") for kind in compiled.src.signature.values()]
    count = sum(is_descriptor)
    call = known.call(compiled, grid, after)
    if not count:
        return call
    if not all(is_descriptor[:count]):
        return None  # our kernels take their descriptors first
    metadata = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * count
    maps = [_Maps(known, one) for one in metadata]

    def launch(stream: int, *pointers: Any) -> None:
        described: list[Any] = []
        for one, descriptor in zip(maps, pointers):
            described += one(descriptor)
        call(stream, *described, *pointers[count:])

    return launch


class _Maps:
    """A descriptor as the launcher takes it, by address: a tensor map or a pointer, then sizes and strides."""

    def __init__(self, known: Version, metadata: Any) -> None:
        self.version, self.metadata = known, metadata
        self.known: dict[int, list[Any]] = {}

    def __call__(self, descriptor: Any) -> list[Any]:
        address = descriptor.base.data_ptr()
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            # Before Hopper there are no maps: Triton passes the tensor itself, which would stay alive here.
            made = self.version.expanded(descriptor, self.metadata)
            found = self.known[address] = [address if item is descriptor.base else item for item in made]
        return found


@functools.cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def is_watched() -> bool:
    """Whether a hook watches Triton's launches, as profilers do."""
    runtime = _runtime()
    entered, left = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(entered, "calls", entered) or getattr(left, "calls", left))
