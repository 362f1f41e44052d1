"""Launches taken down instead of made, so that a plan can be asked what it runs before any of it does.

A plan is called on tensors of the meta device, which have shapes and no memory, while a recording is active. `ahead.py`
compiles what was taken down, `record.py` makes plain data of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from postlude.run.launch import Launch


def _convolved(x: Tensor, weight: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, *_: bool) -> Tensor:
    return torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, False, [0], groups)  # type: ignore[no-any-return]


def _transposed(
    x: Tensor, weight: Tensor, padding: Any, out: Any, stride: Any, dilation: Any, groups: int, *_: bool
) -> Tensor:
    return torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, True, out, groups)  # type: ignore[no-any-return]


# Operators that PyTorch cannot run without memory, by those that it can.
_CUDNN: dict[str, Callable[..., Tensor]] = {
    "aten.cudnn_convolution": _convolved,
    "aten.cudnn_convolution_transpose": _transposed,
}


def run_without_memory(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function of PyTorch on tensors of the meta device."""
    return _CUDNN[str(function)](*args) if str(function) in _CUDNN else function(*args, **kwargs)


class WithoutMemory(TorchFunctionMode):
    """While it is entered, a plan's calls of PyTorch run on tensors of the meta device, cuDNN's own operators too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_without_memory(func, args, kwargs or {})


class Recording:
    def kernel(self, launch: Launch, tensors: tuple[Any, ...]) -> None:
        """A kernel of kernels/triton with its pointers and descriptors."""
        raise NotImplementedError

    def cuda(self, source: str, kernel: str, ready: Any, tensors: tuple[Tensor | None, ...]) -> None:
        """One of kernels/cuda; `ready` knows its macros and numbers, and loads it."""
        raise NotImplementedError


class _Recording(threading.local):
    active: Recording | None = None  # in this thread; None where launches are made


recording = _Recording()


@contextlib.contextmanager
def recorded_by(taker: Recording) -> Iterator[None]:
    before, recording.active = recording.active, taker
    try:
        yield
    finally:
        recording.active = before
