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

# Told a kernel's name and what was compiled when it is launched for the first time: for tools that look on.
watchers: list[Callable[[str, Any], None]] = []


class Recording:
    """Takes down launches in place of running them, while one is active (see record.py)."""

    active: Recording | None = None

    def kernel(self, launch: Launch, tensors: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def cuda(self, source: str, kernel: str, settings: Any, tensors: tuple[Tensor | None, ...]) -> None:
        raise NotImplementedError


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
        if Recording.active is not None:
            Recording.active.kernel(self, tensors)
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

    def _through_triton(self, tensors: tuple[Any, ...]) -> Any:
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants, num_warps=self.warps)
        for watch in watchers:
            watch(self.kernel.__name__, compiled)
        return compiled


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
