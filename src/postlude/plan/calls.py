"""A plan's program as plain data: named buffers, and the calls that read and write them, in order.

A call is a kernel of ours with its grid, its arguments in the order of its signature, its numbers, compile-time
constants and warps; on the CPU its text, its arguments and its numbers; or a named call of PyTorch. Nothing here is a
tensor, a module or a compiled function, so that a program prints, compares and pickles. stages/ makes it
of a plan, run/runner.py runs it, export/ prints it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from postlude.plan.problem import item_size

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
    offset: int = 0  # elements from the beginning of that memory

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * item_size(self.dtype)

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
    stem: str  # of its file in kernels/triton
    kernel: str
    grid: tuple[int, ...]
    parameters: tuple[str, ...]  # of the arguments below, by the names of the signature
    arguments: tuple[Argument, ...]
    numbers: tuple[tuple[str, float], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    unread: tuple[int, ...] = ()  # places of arguments that are neither read nor written

    @property
    def touched(self) -> list[Buffer]:
        """What is read or written, once for each time."""
        places = [argument for place, argument in enumerate(self.arguments) if place not in self.unread]
        return list(buffers_in(places))


@dataclass(frozen=True)
class CudaCall:
    """A kernel of kernels/cuda, compiled by NVRTC with these macros."""

    source: str
    kernel: str
    macros: tuple[tuple[str, float], ...]
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    parameters: tuple[str, ...]  # a word for each buffer
    arguments: tuple[Buffer, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class CppCall:
    """A kernel on the CPU: the text of its file, which includes those of kernels/cpp. All sizes are among its numbers:
    one text serves every shape."""

    kernel: str
    text: str
    parameters: tuple[str, ...]  # a word for each buffer
    arguments: tuple[Buffer, ...]
    numbers: tuple[float, ...]


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

    @property
    def is_view(self) -> bool:
        """Whether it makes nothing but other readings of memory that it is given."""
        given, made = {b.storage for b in buffers_in(self)}, {b.storage for b in self.results if b is not None}
        return bool(made) and made <= given and not self.changes_its_argument


Call = KernelCall | CudaCall | CppCall | TorchCall
ALLOCATIONS = frozenset({"torch.empty", "torch.empty_like", "torch.empty_strided"})


@dataclass(frozen=True)
class Program:
    """One forward pass, and where it is to be differentiated the backward pass from what the forward pass kept."""

    given: tuple[Buffer, ...]  # one per slot of the chain
    forward: tuple[Call, ...]
    result: Buffer
    gradient: Buffer | None = None  # of the result, given to the backward pass
    backward: tuple[Call, ...] = ()
    gradients: tuple[Buffer | None, ...] = ()  # one per slot; None where there is none
    also_kept: tuple[Buffer, ...] = ()  # for second derivatives, although the backward pass reads none of them

    @functools.cached_property
    def kept(self) -> tuple[Buffer, ...]:
        """What the backward pass reads of the forward pass and of what that was given, in the order of its reading."""
        calls = live(self.backward, self.gradients)
        known = {buffer.number for buffer in (*self.given, *made_by(self.forward))}
        known -= {buffer.number for buffer in made_by(calls)}
        read = [buffer for call in calls for buffer in buffers_in(call)]
        read += [gradient for gradient in self.gradients if gradient is not None]
        return tuple(dict.fromkeys([*(buffer for buffer in read if buffer.number in known), *self.also_kept]))

    @functools.cached_property
    def gradient_memory(self) -> tuple[Buffer, ...]:
        """The buffers that the gradients lie in, once each: vectors that are summed together share theirs."""
        first = {buffer.storage: buffer for buffer in reversed(made_by(self.backward))}
        found = {gradient.storage: gradient for gradient in self.gradients if gradient is not None}
        return tuple(first.get(storage, gradient) for storage, gradient in found.items())


def made_by(calls: Iterable[Call]) -> list[Buffer]:
    """The buffers that calls of PyTorch return, views among them; kernels write to buffers that are there."""
    torch_calls = [call for call in calls if isinstance(call, TorchCall)]
    return [buffer for call in torch_calls for buffer in call.results if buffer is not None]


def live(calls: Sequence[Call], results: Iterable[Buffer | None]) -> list[Call]:
    """Without functions of PyTorch whose results nobody reads."""
    read = {buffer.number for buffer in results if buffer is not None}
    kept: list[Call] = []
    for call in reversed(calls):
        made = {b.number for b in call.results if b is not None} if isinstance(call, TorchCall) else set()
        if not isinstance(call, TorchCall) or call.changes_its_argument or made & read:
            kept.append(call)
            read |= {buffer.number for buffer in buffers_in(call)}
    return kept[::-1]


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
    elif isinstance(value, KernelCall | CudaCall | CppCall):
        yield from buffers_in(value.arguments)


def launches(calls: Iterable[Call]) -> list[KernelCall | CudaCall | CppCall]:
    """Of kernels of ours."""
    return [call for call in calls if not isinstance(call, TorchCall)]


def traffic(calls: Iterable[Call]) -> int:
    """Bytes that go to memory and come from it, each buffer of a call once for every time that it is read or written.

    Views and fresh memory cost nothing; neither does a layout that is already there.
    """
    return sum(buffer.bytes for call in calls for buffer in _touched(call))


def _touched(call: Call) -> list[Buffer]:
    if isinstance(call, KernelCall):
        return call.touched
    if isinstance(call, CudaCall | CppCall):
        return list(buffers_in(call.arguments))
    given, made = list(buffers_in(call)), [buffer for buffer in call.results if buffer is not None]
    if call.function in ALLOCATIONS or call.is_view:
        return []
    if {b.storage for b in made} <= {b.storage for b in given}:  # in place
        return made
    is_there = call.function == "Tensor.contiguous" and made[0].strides == given[0].strides
    return [] if is_there else [*given, *made]
