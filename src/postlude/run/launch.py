"""The kernels of a program as callables: by Triton's front end, or with less host time.

Triton's front end inspects every argument of every call, which takes tens of microseconds for a kernel with thirty.
Within one program only the alignment of the caller's tensors can change. A `Launch` remembers what was compiled; if the
caller's tensors are aligned, `bound` is a function of the stream and the pointers only.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postlude.hardware import machine_for
from postlude.plan.program import CudaCall, Descriptor, KernelCall, Steps, Word
from postlude.run import nvrtc
from postlude.run.bound import Bound, bound
from postlude.run.compose import HEADER, compose
from postlude.run.found_again import find_again

ALIGNED = 16  # bytes: Triton uses wider loads for pointers with this alignment, and a descriptor requires it
# Called with a kernel's name and the compiled kernel at its first launch; for tools.
watchers: list[Callable[[str, Any], None]] = []


class Launch:
    """One kernel of a program: its grid, its numbers and its compile-time constants, in the order of its signature."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[float, ...],
        constants: dict[str, Any],
        warps: int = 4,
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.warps = warps
        self._after_tensors = (*numbers, *constants.values())
        self._three = (*grid, 1, 1)[:3]
        self._is_interpreted = not hasattr(kernel, "device_caches")  # the interpreter compiles nothing
        self._compiled: dict[tuple[int, ...], Any] = {}  # by device and alignment of every pointer
        self._latest: Any = None

    def __call__(self, *tensors: Any) -> None:
        """Launches on these tensors or descriptors, which must have the same dtypes at every call."""
        if self._is_interpreted:
            self._through_triton(tensors)
            return
        # As integers: for a tensor Triton asks the driver about its pointer.
        pointers = [tensor.data_ptr() if isinstance(tensor, Tensor) else tensor for tensor in tensors]
        key = (torch.cuda.current_device(), *[p % ALIGNED for p in pointers if isinstance(p, int)])
        compiled = self._compiled.get(key)
        if compiled is None:
            find_again(self.kernel, key[0])
            compiled = self._compiled[key] = self._through_triton(tensors)
        else:
            compiled[self._three](*pointers, *self._after_tensors)
        self._latest = compiled

    def bound(self) -> Bound | None:
        """The bound launch for pointers aligned as in the last call; None if this version of Triton is not known."""
        return bound(self._latest, self._three, self._after_tensors)

    def compile(self, tensors: tuple[Any, ...]) -> Any:
        """The kernel compiled for these arguments on the current device; nothing runs."""
        find_again(self.kernel, torch.cuda.current_device())
        return self.kernel.warmup(*tensors, *self.numbers, grid=self.grid, **self.constants, **self._options())

    def key(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """A key that is equal for launches with the same compiled code."""
        kinds = tuple(map(_kind, (*tensors, *self.numbers)))
        return (self.kernel, kinds, tuple(self.constants.items()), self.warps)

    def _options(self) -> dict[str, Any]:
        from triton import knobs

        # Triton's own default, by name: 3.9 warns where it is not asked for, because 3.10 will have another.
        return {"num_warps": self.warps, "enable_fp_fusion": knobs.language.default_fp_fusion}

    def _through_triton(self, tensors: tuple[Any, ...]) -> Any:
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants, **self._options())
        for watch in watchers:
            watch(self.kernel.__name__, compiled)
        return compiled


def launch_of(call: KernelCall) -> Launch:
    kernel = getattr(importlib.import_module(f"postlude.kernels.triton.{call.stem}"), call.kernel)
    constants = {name: _value(constant) for name, constant in call.constants}
    return Launch(kernel, call.grid, tuple(number for _, number in call.numbers), constants, call.warps)


def _value(constant: Any) -> Any:
    """The value of a call's constant: a dtype, a function or a number."""
    if isinstance(constant, Steps):
        return compose(HEADER + constant.text)[constant.name]
    if not isinstance(constant, Word):
        return constant
    import triton.language as tl

    from postlude.kernels.triton import planes

    name = constant.text.removeprefix("tl.")
    return getattr(planes if name == constant.text else tl, name)


def arguments_without_memory(call: KernelCall) -> tuple[Any, ...]:
    """Fake tensors, descriptors and numbers like those of the call, to compile it for."""
    return tuple(map(_without_memory, call.arguments))


def _without_memory(argument: Any) -> Any:
    if isinstance(argument, int):
        return argument
    if isinstance(argument, Descriptor):
        return DescriptorLike(argument.shape, argument.strides, argument.block)(_without_memory(argument.buffer))
    shape, strides, dtype = argument.shape, argument.strides, getattr(torch, argument.dtype)
    whole = argument.offset + sum(size * stride for size, stride in zip(shape, strides))  # an upper bound
    memory = torch.empty(max(1, whole), dtype=dtype, device="meta")
    return memory.as_strided(shape, strides, argument.offset)  # a view has its own alignment


def _kind(argument: Any) -> Any:
    """What the code depends on: a pointer's dtype and alignment, a descriptor's dtype and block, and how Triton
    specialises a number (whether it is 1, a multiple of 16, or wider than 32 bits)."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNED
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 1 << 31
    block = getattr(argument, "block_shape", None)
    return type(argument) if block is None else (argument.base.dtype, tuple(block))


class DescriptorLike:
    """Makes tensor descriptors of one shape and block; Triton checks only the first one."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> None:
        self.sizes = [list(shape), list(strides), list(block)]
        self.template: Any = None

    def __call__(self, base: Tensor) -> Any:
        if base.data_ptr() % ALIGNED:  # only the caller's tensors may be unaligned
            base = base.clone()
        if self.template is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            template = TensorDescriptor(base, *self.sizes)
            template.base = None  # or the first call's memory would never be freed
            self.template = template
        made = object.__new__(type(self.template))
        made.__dict__.update(self.template.__dict__)
        made.base = base
        return made


class CudaLaunch:
    """A kernel of kernels/cuda, compiled for each device at its first launch there."""

    def __init__(self, call: CudaCall) -> None:
        self.call = call
        self.kernels: dict[int, nvrtc.Kernel] = {}

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].get_device()
        kernel = self.kernels.get(device)
        if kernel is None:
            kernel = self.kernels[device] = cuda_kernel(self.call, device)
        pointers = [tensor.data_ptr() for tensor in tensors]
        kernel.launch(self.call.grid, self.call.threads, (*pointers, *self.call.numbers))

    def bound(self) -> Bound:
        return lambda _, *tensors: self(*tensors)


def cuda_kernel(call: CudaCall, device: int) -> nvrtc.Kernel:
    architecture = machine_for(f"cuda:{device}").card.architecture
    macros = [f"-D{name}={value}" for name, value in call.macros]
    options = (f"--gpu-architecture={architecture}", *macros)
    count = len(call.arguments) + len(call.numbers)
    return _loaded(call.source, call.kernel, options, device, call.shared_bytes, count)


@functools.cache
def _loaded(source: str, kernel: str, options: tuple[str, ...], device: int, shared: int, count: int) -> nvrtc.Kernel:
    return nvrtc.load(cuda_source(source), kernel, options, device, shared, count)


@functools.cache
def cuda_source(name: str) -> nvrtc.Source:
    return nvrtc.read_source(Path(str(resources.files("postlude.kernels") / "cuda")), name)
