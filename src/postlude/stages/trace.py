"""Traces a stage into calls: its launches, and the functions of PyTorch between them, as plain data (plan/program.py).

A stage is a plain function of tensors. It runs once on tensors of the meta device, which have shapes but no memory, and
its launches and calls are recorded. run/runner.py executes them, export/ prints them.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from postlude.plan.problem import CHANNELS_LAST, layout_of
from postlude.plan.program import Argument, Buffer, Call, CppCall, CudaCall, Descriptor, KernelCall, Kind, TorchCall


class Matrix(NamedTuple):
    """A tensor as a kernel reads it through a descriptor (TMA): in blocks of a matrix."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


class Unread(NamedTuple):
    """A placeholder for a kernel argument that this launch neither reads nor writes."""

    filler: Tensor | Matrix


Pointer = Tensor | Matrix | Unread | int


def or_unread(pointer: Tensor | Matrix | None, filler: Tensor | Matrix) -> Pointer:
    return Unread(filler) if pointer is None else pointer


class _Active(threading.local):
    tracer: Tracer | None = None


_active = _Active()


def launch(
    stem: str,
    kernel: str,
    grid: tuple[int, ...],
    tensors: Sequence[Pointer],
    numbers: tuple[float, ...],
    constants: Mapping[str, Any],
    warps: int = 4,
) -> None:
    """Launches a kernel of kernels/triton/`stem`.py: arguments in the order of its signature, then its constants."""
    tracer = _tracer()
    names = tuple(getattr(importlib.import_module(f"postlude.kernels.triton.{stem}"), kernel).arg_names)
    if names[-len(constants) :] != tuple(constants):
        raise ValueError(f"{kernel} takes {names[-len(constants) :]} last, in this order, not {tuple(constants)}")
    first = len(names) - len(constants) - len(numbers)
    with torch._C.DisableTorchFunction():
        arguments = tuple(map(tracer.argument, tensors))
        unread = tuple(place for place, tensor in enumerate(tensors) if isinstance(tensor, Unread))
    given = tuple(zip(names[first:], numbers))
    tracer.calls.append(
        KernelCall(stem, kernel, grid, names[:first], arguments, given, tuple(constants.items()), warps, unread)
    )


def launch_cuda(
    source: str,
    kernel: str,
    macros: Mapping[str, float],
    grid: tuple[int, int],
    threads: int,
    tensors: Mapping[str, Tensor],
    numbers: tuple[int, ...] = (),
) -> None:
    """Launches a kernel of kernels/cuda/`source`. Tensors come before numbers; their keys are names for exported
    files."""
    tracer = _tracer()
    with torch._C.DisableTorchFunction():
        arguments = tuple(map(tracer.buffer, tensors.values()))
    shared, items = int(macros.get("SHARED_BYTES", 0)), tuple(macros.items())
    tracer.calls.append(CudaCall(source, kernel, items, grid, threads, shared, tuple(tensors), arguments, numbers))


def launch_cpp(kernel: str, text: str, tensors: Mapping[str, Tensor], numbers: tuple[float, ...]) -> None:
    """Runs a CPU kernel with this source text. Tensors, each under a name, come before numbers."""
    tracer = _tracer()
    with torch._C.DisableTorchFunction():
        arguments = tuple(map(tracer.buffer, tensors.values()))
    tracer.calls.append(CppCall(kernel, text, tuple(tensors), arguments, numbers))


def settle_layout(tensor: Tensor, layout: torch.memory_format) -> Tensor:
    """`tensor.contiguous(memory_format=layout)`, recorded even if it seems to do nothing: the layout of a library's
    convolution is known only when it runs."""
    tracer = _tracer()
    with torch._C.DisableTorchFunction():
        result = torch.empty_like(tensor, memory_format=layout)
        made = tracer.buffer(result)
        keywords = (("memory_format", layout),)
        tracer.calls.append(TorchCall("Tensor.contiguous", (tracer.buffer(tensor),), keywords, (made,)))
    return result


def _tracer() -> Tracer:
    if _active.tracer is None:
        raise RuntimeError("a stage launches only while it is traced")
    return _active.tracer


class Tracer(TorchFunctionMode):
    """Records the calls that are made inside its context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.buffers: dict[tuple[Any, ...], Buffer] = {}
        self.storages: dict[int, int] = {}
        self.alive: list[Tensor] = []  # so that no two tensors have the same storage
        self.detached: dict[int, Buffer] = {}  # by identity: the same memory, but another value for autograd

    def __enter__(self) -> Tracer:
        assert _active.tracer is None
        _active.tracer = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _active.tracer = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def buffer(self, tensor: Tensor, kind: Kind = "scratch") -> Buffer:
        """The buffer of a tensor; equal for all tensors that are the same part of the same memory."""
        if id(tensor) in self.detached:
            return self.detached[id(tensor)]
        storage = tensor.untyped_storage()._cdata
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        found = self.buffers.get(key)
        if found is None:
            self.alive.append(tensor)
            shared = self.storages.setdefault(storage, len(self.storages))
            number, dtype = len(self.buffers), str(tensor.dtype).removeprefix("torch.")
            sizes = (tuple(tensor.shape), tuple(tensor.stride()))
            found = Buffer(number, *sizes, dtype, kind, shared, int(tensor.storage_offset()))
            self.buffers[key] = found
        return found

    def argument(self, value: Pointer) -> Argument:
        if isinstance(value, Unread):
            value = value.filler
        if isinstance(value, Tensor):
            return self.buffer(value)
        return value if isinstance(value, int) else Descriptor(self.buffer(value.base), *value[1:])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__iter__:  # unbind, as Python calls it
            return iter(self.__torch_function__(Tensor.unbind, types, args, kwargs))
        given = [self._plain(item) for item in (tuple(args), kwargs)]
        result = _WITHOUT_MEMORY.get(str(func), func)(*args, **kwargs)
        made = result if isinstance(result, tuple | list) else (result,)
        known = len(self.buffers)
        if func is Tensor.detach:
            self.alive.append(result)
            made_here = replace(self.buffer(args[0]), number=known, kind="scratch")
            self.buffers[id(result), "detached"] = self.detached[id(result)] = made_here
        results = tuple(self.buffer(item) if isinstance(item, Tensor) else None for item in made)
        call = TorchCall(_name_of(func), given[0], tuple(given[1].items()), results)
        if len(self.buffers) > known or call.changes_its_argument:
            self.calls.append(call)
        return result

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.buffer(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, tuple | list):
            return type(value)(map(self._plain, value))
        if isinstance(value, dict):
            return {key: self._plain(item) for key, item in value.items()}
        return value


def _convolution_gradients(dy: Tensor, x: Tensor, weight: Tensor, *settings: Any) -> tuple[Tensor | None, ...]:
    """Gradients with cuDNN's layout: channels-last if one of the convolution's operands is."""
    found = torch.ops.aten.convolution_backward(dy, x, weight, *settings)
    if "channels_last" not in (layout_of(x), layout_of(weight)):
        return found  # type: ignore[no-any-return]
    layout = CHANNELS_LAST[x.dim() - 2]
    dx, dw = (None if tensor is None else torch.empty_like(tensor, memory_format=layout) for tensor in found[:2])
    return dx, dw, found[2]


# Operators that PyTorch cannot run on the meta device, or whose layout it gets wrong there.
_convolution = torch.ops.aten.convolution
_WITHOUT_MEMORY: dict[str, Callable[..., Any]] = {
    "aten.mkldnn_convolution": lambda x, weight, bias, padding, stride, dilation, groups: _convolution(
        x, weight, bias, stride, padding, dilation, False, [0], groups
    ),
    "aten.cudnn_convolution": lambda x, weight, padding, stride, dilation, groups, *_: _convolution(
        x, weight, None, stride, padding, dilation, False, [0], groups
    ),
    "aten.cudnn_convolution_transpose": lambda x, weight, padding, out, stride, dilation, groups, *_: _convolution(
        x, weight, None, stride, padding, dilation, True, out, groups
    ),
    "aten.convolution_backward": _convolution_gradients,
}
_SPACES = ((torch, "torch"), (F, "F"), (Tensor, "Tensor"), (torch.autograd, "torch.autograd"))


def _name_of(function: Any) -> str:
    name = str(getattr(function, "__name__", function))
    if isinstance(function, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        return f"torch.ops.{function!s}"
    for space, word in _SPACES:
        if getattr(space, name, None) is function:
            return f"{word}.{name}"
    if hasattr(Tensor, name):
        return f"Tensor.{name}"
    return f"{getattr(function, '__module__', '')}.{name}"


def without_saving_hooks() -> saved_tensors_hooks:
    """Hides what autograd saves inside from hooks that are set outside, such as those of a checkpoint, which counts."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def empty_strided(tensor: Tensor) -> Tensor:
    """A tensor like this one without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def derived(function: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """The gradients of `function(*inputs)` for `dy`, by the operators that PyTorch's autograd would run."""

    def gradients(*given: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in given[:-1]]
        with torch.enable_grad():
            result = function(*leaves)
        return torch.autograd.grad(result, leaves, given[-1], allow_unused=True, materialize_grads=True)

    with torch._C.DisableTorchFunction(), without_saving_hooks():
        graph: Any = make_fx(gradients)(*inputs, dy)
        graph.graph.eliminate_dead_code()
    found: list[Tensor] = fx.Interpreter(graph).run(*inputs, dy)  # operator by operator, so that each is recorded
    return found
