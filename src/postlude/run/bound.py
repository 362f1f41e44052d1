"""A compiled Triton kernel with all but its pointers bound: one call of Triton's launcher in C, and nothing before it.

Triton 3.6 spends 10 to 20 µs of Python on a launch and 4 µs on each descriptor, whose map is made anew although it
depends on nothing but an address. Maps are kept here by address. Other versions are left to their own way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Bound = Callable[..., None]  # of the stream, then of pointers as numbers, descriptors and numbers
_KNOWN = "3.6."  # Triton's versions whose launcher this was written for
_REMEMBERED = 256  # addresses of a descriptor before the look-up starts anew


def bound(compiled: Any, grid: tuple[int, ...], after: tuple[Any, ...]) -> Bound | None:
    """`after` are the numbers and constants behind the pointers; None where the launch needs more than that."""
    import triton

    run = compiled.run
    scratch = getattr(run, "global_scratch_size", 1) + getattr(run, "profile_scratch_size", 1)
    if not triton.__version__.startswith(_KNOWN) or scratch:
        return None
    launcher = run.launch
    no_hooks = (None, None, None)  # whoever set one is served by Triton's own way (is_watched)
    how = (run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, *no_hooks)
    fixed = (compiled.function, *how)
    if inspect.isbuiltin(launcher):
        return lambda stream, *pointers: launcher(*grid, stream, *fixed, *pointers, *after)
    inside = inspect.getclosurevars(launcher).nonlocals  # it makes the descriptors' maps
    launcher, maps = inside["launcher"], [_Maps(meta) for meta in inside["tensordesc_meta"]]
    count = len(maps)
    if inside["tensordesc_indices"] != set(range(count)):
        return None  # kernels of ours take their descriptors first

    def launch(stream: int, *pointers: Any) -> None:
        described: list[Any] = []
        for one, descriptor in zip(maps, pointers):
            described += one(descriptor)
        launcher(*grid, stream, *fixed, *described, *pointers[count:], *after)

    return launch


class _Maps:
    """A descriptor as the launcher takes it, by its address."""

    def __init__(self, meta: Any) -> None:
        self.meta = meta
        self.known: dict[int, list[Any]] = {}

    def __call__(self, descriptor: Any) -> list[Any]:
        address = descriptor.base.data_ptr()
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            found = self.known[address] = _made()(descriptor, self.meta)
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
    """Whether somebody has asked Triton to be told of every launch."""
    runtime = _runtime()
    entered, left = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(entered, "calls", entered) or getattr(left, "calls", left))
