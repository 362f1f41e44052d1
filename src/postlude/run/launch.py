"""Launching Triton kernels at little cost to the host.

Triton's front end looks at every argument of every call, which takes tens of microseconds for a kernel of thirty.
What it looks for stays the same for one plan, but for the alignment of the caller's tensors: a `Launch` keeps what was
compiled and calls it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from postlude.run.found_again import find_again
from postlude.run.recording import recording

# Told a kernel's name and what was compiled when it is launched for the first time: for tools that look on.
watchers: list[Callable[[str, Any], None]] = []


class Launch:
    """One kernel of a plan: its grid, its numbers and its compile-time constants, in the order of its signature."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[float, ...],
        constants: dict[str, Any],
        warps: int = 4,
    ) -> None:
        names = tuple(kernel.arg_names)[-len(constants) :]
        if names != tuple(constants):
            raise ValueError(f"{kernel.__name__} takes {names} last, in this order, not {tuple(constants)}")
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.warps = warps
        self._after_tensors = (*numbers, *constants.values())
        self._three = (*grid, 1, 1)[:3]
        self._compiled: dict[tuple[int, ...], Any] = {}

    def __call__(self, *tensors: Any) -> None:
        """Runs it on these pointers (tensors, or descriptors of tensors): always of the same dtypes."""
        if recording.active is not None:
            recording.active.kernel(self, tensors)
            return
        if not hasattr(self.kernel, "device_caches"):  # Triton's interpreter, which compiles nothing
            self._through_triton(tensors)
            return
        # As numbers, for the driver is asked about every pointer that comes as a tensor.
        pointers = [tensor.data_ptr() if isinstance(tensor, Tensor) else tensor for tensor in tensors]
        key = (torch.cuda.current_device(), *[p % 16 for p in pointers if isinstance(p, int)])
        compiled = self._compiled.get(key)
        if compiled is None:
            find_again(self.kernel, key[0])
            self._compiled[key] = self._through_triton(tensors)[self._three]
        else:
            compiled(*pointers, *self._after_tensors)

    def compile(self, tensors: tuple[Any, ...]) -> Any:
        """What these arguments are launched with, compiled for the current device; nothing runs."""
        find_again(self.kernel, torch.cuda.current_device())
        return self.kernel.warmup(*tensors, *self.numbers, grid=self.grid, **self.constants, num_warps=self.warps)

    def key(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Equal for launches that are compiled to the same code."""
        kinds = tuple(map(_kind, (*tensors, *self.numbers)))
        return (self.kernel, kinds, tuple(self.constants.items()), self.warps)

    def _through_triton(self, tensors: tuple[Any, ...]) -> Any:
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants, num_warps=self.warps)
        for watch in watchers:
            watch(self.kernel.__name__, compiled)
        return compiled


def _kind(argument: Any) -> Any:
    """What code depends on: a pointer's dtype and alignment, a descriptor's dtype and block, what Triton makes of a
    number (whether it is 1, a multiple of 16, or wider than 32 bits)."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 1 << 31
    block = getattr(argument, "block_shape", None)
    return type(argument) if block is None else (argument.base.dtype, tuple(block))


def accumulator(dtype: torch.dtype) -> Any:
    """Triton's word for the dtype that sums are kept in."""
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def descriptor(template: Any, base: Tensor) -> Any:
    """A tensor descriptor like `template` over another tensor; its checks were made when the template was."""
    made = object.__new__(type(template))
    made.__dict__.update(template.__dict__)
    made.base = base
    return made
