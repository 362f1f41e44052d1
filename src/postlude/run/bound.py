"""A compiled Triton kernel with everything bound but its pointers: a launch is one call of Triton's C launcher.

Triton 3.6 spends 10 to 20 µs of Python on a launch, and 4 µs on each descriptor: it makes the tensor map anew although
that depends only on the address. We cache maps by address. Other versions of Triton use their own launch path.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Bound = Callable[..., None]  # takes the stream, then pointers as integers, descriptors and numbers
_KNOWN = "3.6."  # the versions of Triton whose launcher this was written for
_REMEMBERED = 256  # addresses of a descriptor before the cache is cleared


def bound(compiled: Any, grid: tuple[int, ...], after: tuple[Any, ...]) -> Bound | None:
    """A function that launches a compiled kernel; None if the launch needs more than pointers and numbers.

    `after` are the numbers and constants after the pointers.
    """
    import triton

    run = compiled.run
    scratch = getattr(run, "global_scratch_size", 1) + getattr(run, "profile_scratch_size", 1)
    if not triton.__version__.startswith(_KNOWN) or scratch:
        return None
    launcher = run.launch
    no_hooks = (None, None, None)  # with hooks set, Triton's own launch path is used (is_watched)
    how = (run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, *no_hooks)
    fixed = (compiled.function, *how)
    if inspect.isbuiltin(launcher):
        return lambda stream, *pointers: launcher(*grid, stream, *fixed, *pointers, *after)
    inside = inspect.getclosurevars(launcher).nonlocals  # it makes the descriptors' maps
    launcher, maps = inside["launcher"], [_Maps(meta) for meta in inside["tensordesc_meta"]]
    count = len(maps)
    if inside["tensordesc_indices"] != set(range(count)):
        return None  # our kernels take their descriptors first

    def launch(stream: int, *pointers: Any) -> None:
        described: list[Any] = []
        for one, descriptor in zip(maps, pointers):
            described += one(descriptor)
        launcher(*grid, stream, *fixed, *described, *pointers[count:], *after)

    return launch


class _Maps:
    """A descriptor as the launcher takes it, by address: a tensor map or a pointer, then sizes and strides."""

    def __init__(self, meta: Any) -> None:
        self.meta = meta
        self.known: dict[int, list[Any]] = {}

    def __call__(self, descriptor: Any) -> list[Any]:
        address = descriptor.base.data_ptr()
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            # Before Hopper there are no maps: Triton passes the tensor itself, which would stay alive here.
            made = _made()(descriptor, self.meta)
            found = self.known[address] = [address if item is descriptor.base else item for item in made]
        return found


@functools.cache
def _made() -> Callable[[Any, Any], list[Any]]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg  # type: ignore[no-any-return]


@functools.cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def is_watched() -> bool:
    """Whether a hook watches Triton's launches, as profilers do."""
    runtime = _runtime()
    entered, left = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(entered, "calls", entered) or getattr(left, "calls", left))
