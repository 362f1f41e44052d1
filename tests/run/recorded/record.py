"""Launches the kernels of chain 61 by Triton's own path and by ours, with libcuda.c in the driver's place.

Prints, for the code as it is and for each mutant, what the driver was given for each launch by either path. Each kernel
is launched on two sets of tensors.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from cases import CHAIN_61
from machines import card
from postlude.check import tensors_for
from postlude.plan import problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.program import Descriptor, KernelCall
from postlude.run import bound, launch
from postlude.run.ahead import program_of
from postlude.run.execute import prepare
from postlude.run.launch import DescriptorLike, launch_of

STREAM = 77
SHAPE = (2, 64, 8, 8, 8)
LIBRARY = ctypes.CDLL("libcuda.so.1")


class Driver(CudaDriver):
    """Triton's driver over the stand-in."""

    def __init__(self, architecture: int) -> None:
        super().__init__()
        self.architecture = architecture
        self.get_current_stream = lambda device: STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


@contextmanager
def on_card(architecture: int) -> Iterator[None]:
    """Triton keeps what it has compiled by device, so each architecture is another device."""
    with patch("torch.cuda.current_device", lambda: architecture):
        driver.set_active(Driver(architecture))
        yield


def calls(architecture: int) -> list[KernelCall]:
    tensors = tensors_for(CHAIN_61, SHAPE, torch.float32, "cpu")
    problem = dataclasses.replace(problem_of(tensors, "fp32"), device="cuda")
    plan = lower_for_gpu(CHAIN_61, problem, card(architecture), even_if_slower=True)
    program = program_of(CHAIN_61, prepare(CHAIN_61, plan), problem, [False] * len(tensors))
    return [call for call in program.forward if isinstance(call, KernelCall)]


def in_memory(argument: Any) -> Any:
    if isinstance(argument, int):
        return argument
    if isinstance(argument, Descriptor):
        made = DescriptorLike(argument.shape, argument.strides, argument.block)
        return made(in_memory(argument.buffer))
    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.strides))
    memory = torch.empty(argument.offset + last + 1, dtype=getattr(torch, argument.dtype))
    return memory.as_strided(argument.shape, argument.strides, argument.offset)


def parameter_sizes(ptx: str) -> list[int]:
    """In bytes, as the compiled kernel has them."""
    signature = re.search(r"\.entry\s+\w+\(([^)]*)\)", ptx)
    assert signature is not None
    found = re.findall(r"\.param\s.*?\.[a-z](\d+)\s[^,\[]*(?:\[(\d+)\])?", signature[1])
    return [int(bits) // 8 * int(count or 1) for bits, count in found]


def driver_was_given(ptx: str, run: Callable[[], object]) -> str:
    sizes = parameter_sizes(ptx)
    LIBRARY.expect(len(sizes), (ctypes.c_size_t * len(sizes))(*sizes))
    run()
    assert LIBRARY.launched() == 1
    record = ctypes.create_string_buffer(1 << 16)
    size = LIBRARY.recorded(record)
    return record.raw[:size].hex()


def both_paths(call: KernelCall) -> list[dict[str, Any]]:
    ours: Any = None
    found, kept = [], []
    launch = launch_of(call)
    for _ in range(2):
        tensors = tuple(map(in_memory, call.arguments))
        kept.append(tensors)  # or the second set would have the first one's addresses
        compiled = launch.compile(tensors)
        theirs = driver_was_given(compiled.asm["ptx"], partial(launch, *tensors))
        ours = ours or launch.bound()
        pointers = [tensor.data_ptr() if isinstance(tensor, Tensor) else tensor for tensor in tensors]
        row = {"kernel": call.kernel, "descriptors": sum(isinstance(item, Descriptor) for item in call.arguments)}
        row["maps"] = len(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        row["theirs"], row["ours"] = theirs, None
        if ours is not None:
            row["ours"] = driver_was_given(compiled.asm["ptx"], partial(ours, STREAM, *pointers))
        found.append(row)
    return found


def is_held(call: KernelCall) -> bool:
    """Whether a kernel stays loaded when only its bound launch is left; Triton 3.6 and 3.7 never unload one."""
    tensors = tuple(map(in_memory, call.arguments))
    launch = launch_of(call)
    LIBRARY.expect(0, None)
    launch(*tensors)
    ours, kernel, before = launch.bound(), weakref.ref(launch._latest), LIBRARY.unloads()
    launch.kernel.device_caches.pop(driver.active.get_current_device())
    del launch
    gc.collect()
    return ours is not None and kernel() is not None and LIBRARY.unloads() == before


def _first_map(self: Any, descriptor: Any) -> Any:
    self.known.setdefault(0, self.version.expanded(descriptor, self.metadata))
    return self.known[0]


def _bound_of(change: Callable[..., tuple[Any, ...]]) -> Callable[[], AbstractContextManager[Any]]:
    """A mutant that binds something else than the kernel, the grid and the numbers that it is asked for."""
    return lambda: patch.object(launch, "bound", lambda *asked: bound.bound(*change(*asked)))


def _parts(kernel: Any) -> Any:
    names = ("run", "function", "packed_metadata", "src", "metadata")
    return SimpleNamespace(**{name: getattr(kernel, name) for name in names})


MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "one map for all addresses": lambda: patch.object(bound._Maps, "__call__", _first_map),
    "another grid": _bound_of(lambda kernel, grid, after: (kernel, (grid[0] + 1, *grid[1:]), after)),
    "other numbers": _bound_of(lambda kernel, grid, after: (kernel, grid, (after[0] + 1, *after[1:]))),
    "the kernel's parts": _bound_of(lambda kernel, grid, after: (_parts(kernel), grid, after)),  # right until unloaded
}


def main() -> None:
    launches: dict[str, Any] = {name: {} for name in MUTANTS}
    for architecture in (90, 80):
        with on_card(architecture):
            for name, mutant in MUTANTS.items():
                chosen = [
                    call for call in calls(architecture) if architecture == 90 or call.kernel == "convolve_kernel"
                ]
                with mutant():
                    launches[name][architecture] = [row for call in chosen for row in both_paths(call)]
    with on_card(80):
        held = [is_held(calls(80)[0])]
        with MUTANTS["the kernel's parts"]():
            held.append(is_held(calls(80)[0]))
    print(json.dumps({"launches": launches, "held": held}))


if __name__ == "__main__":
    main()
