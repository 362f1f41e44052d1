"""A plan's program of calls, by recording what its runner does.

The runner is called on `meta` tensors, which have shapes and no memory. Launches are taken down in place of being run
(recording.py), PyTorch's functions as they are called, by a function mode. What comes out is plain data
(plan/calls.py), for these shapes, dtypes and strides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from postlude import reference
from postlude.chain import Chain
from postlude.plan import Plan
from postlude.plan.calls import (
    Argument,
    Buffer,
    Call,
    CudaCall,
    Descriptor,
    KernelCall,
    Kind,
    Program,
    Steps,
    TorchCall,
    Word,
)
from postlude.plan.types import Moments
from postlude.run.gpu import GpuRun
from postlude.run.launch import Launch
from postlude.run.moments_training import MomentsTraining, _MomentsFunction
from postlude.run.recording import Recording, recording, run_without_memory
from postlude.run.training import Training, _ChainFunction


class Recorder(TorchFunctionMode, Recording):
    """Takes down the calls that are made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.buffers: dict[tuple[Any, ...], Buffer] = {}
        self.storages: dict[int, int] = {}
        self.alive: list[Tensor] = []  # so that no two tensors have the same storage
        self.detached: dict[int, Buffer] = {}  # by identity: the same memory, and another value to autograd

    def __enter__(self) -> Recorder:
        assert recording.active is None
        recording.active = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        recording.active = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def buffer(self, tensor: Tensor, kind: Kind = "scratch") -> Buffer:
        """The same for every tensor that is the same part of the same memory."""
        if id(tensor) in self.detached:
            return self.detached[id(tensor)]
        storage = tensor.untyped_storage()._cdata
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        found = self.buffers.get(key)
        if found is None:
            self.alive.append(tensor)
            shared = self.storages.setdefault(storage, len(self.storages))
            number, dtype = len(self.buffers), str(tensor.dtype).removeprefix("torch.")
            found = Buffer(number, tuple(tensor.shape), tuple(tensor.stride()), dtype, kind, shared)
            self.buffers[key] = found
        return found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__iter__:  # unbind, as Python calls it
            return iter(self.__torch_function__(Tensor.unbind, types, args, kwargs))
        given = [self._plain(item) for item in (tuple(args), kwargs)]
        result = run_without_memory(func, args, kwargs)
        made = result if isinstance(result, tuple | list) else (result,)
        known = len(self.buffers)
        if func is Tensor.detach:
            self.alive.append(result)
            base = self.buffer(args[0])
            self.buffers[id(result), "detached"] = self.detached[id(result)] = replace(
                base, number=known, kind="scratch"
            )
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

    def kernel(self, launch: Launch, tensors: tuple[Any, ...]) -> None:
        names = tuple(launch.kernel.arg_names)
        first = len(names) - len(launch.constants) - len(launch.numbers)
        with torch._C.DisableTorchFunction():
            arguments = tuple(map(self._argument, tensors))
        self.calls.append(
            KernelCall(
                launch.kernel.__name__,
                launch.grid,
                names[:first],
                arguments,
                tuple(zip(names[first:], launch.numbers)),
                tuple((name, _constant(value)) for name, value in launch.constants.items()),
                launch.warps,
            )
        )

    def cuda(self, source: str, kernel: str, settings: Any, tensors: tuple[Tensor | None, ...]) -> None:
        with torch._C.DisableTorchFunction():
            arguments = tuple(None if tensor is None else self.buffer(tensor) for tensor in tensors)
        macros = tuple(settings.macros.items())
        shared = settings.macros["SHARED_BYTES"]
        self.calls.append(
            CudaCall(source, kernel, macros, settings.grid, settings.threads, shared, arguments, settings.sizes)
        )

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, Tensor):
            return self.buffer(value)
        if isinstance(value, int):
            return value
        return Descriptor(self.buffer(value.base), tuple(value.shape), tuple(value.strides), tuple(value.block_shape))


def _name_of(function: Any) -> str:
    name = str(getattr(function, "__name__", function))
    if isinstance(function, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        return f"torch.ops.{function!s}"
    for space, word in ((torch, "torch"), (F, "F"), (Tensor, "Tensor"), (torch.autograd, "torch.autograd")):
        if getattr(space, name, None) is function:
            return f"{word}.{name}"
    if hasattr(Tensor, name):
        return f"Tensor.{name}"
    return f"{getattr(function, '__module__', '')}.{name}"


def _constant(value: Any) -> Any:
    if hasattr(value, "arg_names"):  # a device function
        function = getattr(value, "fn", value)
        if function.__module__ == "postlude.emitted":
            return Steps(function.__name__, inspect.getsource(function))
        return Word(function.__name__)
    if type(value).__name__ == "dtype":
        return Word({"fp32": "tl.float32", "fp64": "tl.float64"}[str(value)])
    return value


def empty_strided(tensor: Tensor) -> Tensor:
    """A tensor like this one without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def record_inference(plan: Plan, chain: Chain, tensors: Sequence[Tensor]) -> Program:
    """The forward pass of `chain`, whose first steps the plan has: the others are PyTorch's."""
    run = GpuRun(plan)

    def whole(given: Sequence[Tensor]) -> Tensor:
        result = run.parts(given)[0]
        return reference.continue_from(chain, len(plan.chain.steps), result, given, moves=True)

    return _recorded(whole, tensors)


def record_plain(chain: Chain, tensors: Sequence[Tensor]) -> Program:
    """The chain through PyTorch's own functions."""
    return _recorded(lambda given: reference.evaluate(chain, given), tensors)


def record_rest(chain: Chain, first: int, value: Tensor, tensors: Sequence[Tensor]) -> Program:
    """The steps after step `first`, whose result is the first buffer that is given."""
    return _recorded(lambda given: reference.continue_from(chain, first, given[0], given[1:]), [value, *tensors])


def _recorded(function: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Program:
    given = [empty_strided(tensor) for tensor in tensors]
    recorder = Recorder()
    slots = tuple(recorder.buffer(tensor, "given") for tensor in given)
    with torch.no_grad(), recorder:
        result = function(given)
    return Program(slots, tuple(recorder.calls), recorder.buffer(result, "result"))


class _Context:
    """As much of autograd's context as the library's functions ask for."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = (False, *needs)
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def record_training(plan: Plan, tensors: Sequence[Tensor], needs: Sequence[bool]) -> Program:
    """The forward pass of the plan's chain and the backward pass from what it keeps."""
    is_moments = isinstance(plan.passes[-1].sink, Moments)
    training: Any = MomentsTraining(plan) if is_moments else Training(plan)
    function: Any = _MomentsFunction if is_moments else _ChainFunction
    given = [empty_strided(tensor) for tensor in tensors]
    recorder, context = Recorder(), _Context(needs)
    slots = tuple(recorder.buffer(tensor, "given") for tensor in given)
    with torch.no_grad(), recorder:
        result = function.forward(context, training, *given)
    forward, recorder.calls = tuple(recorder.calls), []
    dy = torch.empty_like(result)
    gradient = recorder.buffer(dy, "given")
    with torch.no_grad(), recorder:
        found = function.backward(context, dy)[1:]
    gradients = tuple(None if grad is None else recorder.buffer(grad, "result") for grad in found)
    end = recorder.buffer(result, "result")
    return Program(slots, forward, end, gradient, tuple(recorder.calls), gradients)
