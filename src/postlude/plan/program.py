"""A plan's program as plain data: named buffers, and the calls that read and write them, in order.

A call is one of three things: a GPU kernel of ours with its grid, arguments in the order of its signature, numbers,
compile-time constants and warps; a CPU kernel of ours with its source text, arguments and numbers; or a named function
of PyTorch. Nothing here is a tensor, a module or a compiled function, so a program can be printed, compared and
pickled. stages/ builds it from a plan, run/runner.py executes it, export/ prints it.
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
    offset: int = 0  # in elements from the start of that memory

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
    """A compile-time constant that is a name: a Triton dtype or a device function."""

    text: str


@dataclass(frozen=True)
class Steps:
    """A composed device function as a compile-time constant: the emitted steps of a pass."""

    name: str
    text: str


Argument = Buffer | Descriptor | int


@dataclass(frozen=True)
class KernelCall:
    stem: str  # file name in kernels/triton, without .py
    kernel: str
    grid: tuple[int, ...]
    parameters: tuple[str, ...]  # names in the signature of the arguments below
    arguments: tuple[Argument, ...]
    numbers: tuple[tuple[str, float], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    unread: tuple[int, ...] = ()  # indices of arguments that are neither read nor written

    @property
    def touched(self) -> list[Buffer]:
        """The buffers that are read or written, as often as they are."""
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
    """A CPU kernel, given by its source text, which includes the headers of kernels/cpp.

    All sizes are among its numbers, so one text serves every shape.
    """

    kernel: str
    text: str
    parameters: tuple[str, ...]  # a word for each buffer
    arguments: tuple[Buffer, ...]
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class TorchCall:
    """A call of PyTorch's `function`: torch.empty, F.conv3d, Tensor.view, torch.ops.aten.convolution_backward."""

    function: str
    arguments: tuple[Any, ...]  # buffers and literals, nested as they were given
    keywords: tuple[tuple[str, Any], ...]
    results: tuple[Buffer | None, ...]  # None where PyTorch returns None, as for a gradient that is not needed

    @property
    def changes_its_argument(self) -> bool:
        name = self.function.rpartition(".")[2]
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in dict(self.keywords)

    @property
    def is_view(self) -> bool:
        """Whether all its results are views of its arguments."""
        given, made = {b.storage for b in buffers_in(self)}, {b.storage for b in self.results if b is not None}
        return bool(made) and made <= given and not self.changes_its_argument


Call = KernelCall | CudaCall | CppCall | TorchCall
ALLOCATIONS = frozenset({"torch.empty", "torch.empty_like", "torch.empty_strided"})


@dataclass(frozen=True)
class Program:
    """A forward pass and, for training, the backward pass that reads what the forward pass kept."""

    given: tuple[Buffer, ...]  # one per slot of the chain
    forward: tuple[Call, ...]
    result: Buffer
    gradient: Buffer | None = None  # of the result, given to the backward pass
    backward: tuple[Call, ...] = ()
    gradients: tuple[Buffer | None, ...] = ()  # one per slot; None where there is none
    also_kept: tuple[Buffer, ...] = ()  # for second derivatives, although the backward pass reads none of them

    @functools.cached_property
    def kept(self) -> tuple[Buffer, ...]:
        """The buffers of the forward pass, its inputs included, that the backward pass reads, in the order of
        reading."""
        calls = live(self.backward, self.gradients)
        known = {buffer.number for buffer in (*self.given, *made_by(self.forward))}
        known -= {buffer.number for buffer in made_by(calls)}
        read = [buffer for call in calls for buffer in buffers_in(call)]
        read += [gradient for gradient in self.gradients if gradient is not None]
        return tuple(dict.fromkeys([*(buffer for buffer in read if buffer.number in known), *self.also_kept]))

    @functools.cached_property
    def gradient_memory(self) -> tuple[Buffer, ...]:
        """The buffers that hold the gradients, each once. Vectors whose gradients are summed together share one."""
        first = {buffer.storage: buffer for buffer in reversed(made_by(self.backward))}
        found = {gradient.storage: gradient for gradient in self.gradients if gradient is not None}
        return tuple(first.get(storage, gradient) for storage, gradient in found.items())


def made_by(calls: Iterable[Call]) -> list[Buffer]:
    """The buffers that calls of PyTorch return, views included. Kernels write only to existing buffers."""
    torch_calls = [call for call in calls if isinstance(call, TorchCall)]
    return [buffer for call in torch_calls for buffer in call.results if buffer is not None]


def live(calls: Sequence[Call], results: Iterable[Buffer | None]) -> list[Call]:
    """The calls without functions of PyTorch whose results are never read."""
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
    """The launches of our own kernels among the calls."""
    return [call for call in calls if not isinstance(call, TorchCall)]


def traffic(calls: Iterable[Call]) -> int:
    """Bytes read from and written to memory: each buffer of a call counts each time it is read or written.

    Views and allocations cost nothing, and neither does a conversion to a layout that a tensor already has.
    """
    return sum(buffer.bytes for call in calls for buffer in _touched(call))


def most_memory(calls: Sequence[Call], results: Iterable[Buffer | None] = ()) -> int:
    """The most bytes that the calls have allocated at a time. Memory is freed after its last use, results are not.

    A library's own scratch memory is not known.
    """
    sizes: dict[int, int] = {}  # by storage, in the order in which it is made
    made, last = dict[int, int](), dict[int, int]()
    for number, call in enumerate(calls):
        given = list(buffers_in(call))
        last |= {buffer.storage: number for buffer in given}
        for buffer in made_by([call]):
            if buffer.storage not in last:
                made[buffer.storage], sizes[buffer.storage] = number, buffer.bytes
            last[buffer.storage] = number
    last |= {buffer.storage: len(calls) for buffer in results if buffer is not None}
    alive = ([s for s in sizes if made[s] <= number <= last[s]] for number in range(len(calls)))
    return max((sum(sizes[storage] for storage in some) for some in alive), default=0)


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
