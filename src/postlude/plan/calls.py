"""A plan's program as plain data: named buffers, and the calls that read and write them, in order.

A call is a kernel of ours with its grid, its arguments in the order of its signature, its numbers, compile-time
constants and warps; or a named call of PyTorch. Nothing here is a tensor, a module or a compiled function, so that a
program prints, compares and pickles. How it was obtained is none of its concern: `run/record.py` writes down what the
runners launch; a planner may build the same data directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["given", "kept", "result", "scratch"]


@dataclass(frozen=True)
class Buffer:
    """A tensor of a program. A view of another buffer is a buffer of its own, made by the call that takes the view."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    kind: Kind
    storage: int  # equal for buffers that share memory

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor (TMA) over a buffer: the shape and strides of the matrix, and the block that a load takes."""

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True)
class Word:
    """A compile-time constant that goes by a name: a dtype of Triton, or a device function."""

    text: str


@dataclass(frozen=True)
class Steps:
    """A composed device function as a compile-time constant: the emitted steps of a pass."""

    name: str
    text: str


Argument = Buffer | Descriptor | int


@dataclass(frozen=True)
class KernelCall:
    kernel: str  # its name in kernels/triton
    grid: tuple[int, ...]
    parameters: tuple[str, ...]  # of the arguments below, by the names of the signature
    arguments: tuple[Argument, ...]
    numbers: tuple[tuple[str, float], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int


@dataclass(frozen=True)
class CudaCall:
    """A kernel of kernels/cuda, compiled by NVRTC with these macros."""

    source: str
    kernel: str
    macros: tuple[tuple[str, int], ...]
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    arguments: tuple[Buffer | None, ...]  # None: a null pointer
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class TorchCall:
    """`function` as PyTorch names it: torch.empty, F.conv3d, Tensor.view, torch.ops.aten.convolution_backward."""

    function: str
    arguments: tuple[Any, ...]  # buffers and literals, nested as they were given
    keywords: tuple[tuple[str, Any], ...]
    results: tuple[Buffer | None, ...]  # None where PyTorch gives none, as for a gradient that was not asked for

    @property
    def changes_its_argument(self) -> bool:
        name = self.function.rpartition(".")[2]
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in dict(self.keywords)


Call = KernelCall | CudaCall | TorchCall


@dataclass(frozen=True)
class Program:
    """One forward pass, and where it is to be differentiated the backward pass from what the forward pass kept."""

    given: tuple[Buffer, ...]  # one per slot of the chain
    forward: tuple[Call, ...]
    result: Buffer
    gradient: Buffer | None = None  # of the result, given to the backward pass
    backward: tuple[Call, ...] = ()
    gradients: tuple[Buffer | None, ...] = ()  # one per slot; None where there is none


def buffers_in(value: Any) -> Iterator[Buffer]:
    """The buffers among the arguments of a call, however nested."""
    if isinstance(value, Buffer):
        yield value
    elif isinstance(value, Descriptor):
        yield value.buffer
    elif isinstance(value, tuple | list):
        for item in value:
            yield from buffers_in(item)
    elif isinstance(value, dict):
        yield from buffers_in(list(value.values()))
    elif isinstance(value, TorchCall):
        yield from buffers_in((value.arguments, dict(value.keywords)))
    elif isinstance(value, KernelCall | CudaCall):
        yield from buffers_in(value.arguments)
