"""Runs any program: generates one Python function for it, which allocates, launches and frees in order.

What is the same at every call is bound before the first one: launches, functions of PyTorch, sizes. Small scratch
buffers that only kernels use come from one allocation. Others are allocated at their first use and freed after the
last.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.plan.problem import item_size
from postlude.plan.program import (
    ALLOCATIONS,
    Buffer,
    Call,
    CppCall,
    CudaCall,
    Descriptor,
    KernelCall,
    TorchCall,
    buffers_in,
    live,
    made_by,
)
from postlude.run.bound import Bound, is_watched
from postlude.run.cpp import CppLaunch
from postlude.run.launch import ALIGNED, CudaLaunch, DescriptorLike, Launch, launch_of

Run = Callable[..., tuple[Tensor | None, ...]]
Kernel = Launch | CudaLaunch | CppLaunch
_POOLED = 64 << 10  # most bytes of a buffer that shares an allocation
_ROUND = 256  # alignment in bytes within a shared allocation


def runner_of(
    given: Sequence[Buffer], calls: Sequence[Call], results: Sequence[Buffer | None], device: str
) -> ProgramRunner:
    """A function that takes the `given` tensors and returns the `results`."""
    return ProgramRunner(given, live(calls, results), results, torch.device(device))


class ProgramRunner:
    """Launches through Triton's front end at the first call, which compiles; then with bound launches."""

    def __init__(
        self, given: Sequence[Buffer], calls: Sequence[Call], results: Sequence[Buffer | None], device: torch.device
    ) -> None:
        self.device = device
        launches = [(call, _launch(call)) for call in calls]
        self.write = functools.partial(_Writer, given, launches, results, device)
        self.launches = [launch for _, launch in launches if launch is not None]
        self.slow: Run = self.write({}).function()
        self.run: Run = self._first

    def __call__(self, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return self.run(*tensors)

    def _first(self, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        results = self.slow(*tensors)
        is_aligned = not any(tensor.data_ptr() % ALIGNED for tensor in tensors)
        if self.device.type == "cuda" and self.launches and is_aligned:
            bound = {launch: launch.bound() for launch in self.launches if not isinstance(launch, CppLaunch)}
            self.run = self.slow if None in bound.values() else self.write(bound, self.slow).function()
        return results


def _launch(call: Call) -> Kernel | None:
    if isinstance(call, TorchCall):
        return None
    if isinstance(call, CppCall):
        return CppLaunch(call)
    return CudaLaunch(call) if isinstance(call, CudaCall) else launch_of(call)


class _Writer:
    """Writes the text of one function. If launches are bound, `slow` handles unaligned tensors and watched launches."""

    def __init__(
        self,
        given: Sequence[Buffer],
        calls: Sequence[tuple[Call, Kernel | None]],
        results: Sequence[Buffer | None],
        device: torch.device,
        bound: Mapping[Any, Bound | None],
        slow: Run | None = None,
    ) -> None:
        self.given, self.results, self.bound = given, results, bound
        self.calls, self.launches = [call for call, _ in calls], [launch for _, launch in calls]
        self.names: dict[str, Any] = {"torch": torch, "device": device}
        self.lines: list[str] = []
        self.last = self._last_uses()
        if bound:
            self.names |= {"slow": slow, "stream_of": torch._C._cuda_getCurrentRawStream, "is_watched": is_watched}
            names = [f"b{buffer.number}" for buffer in given]
            pointers = " | ".join(f"{name}.data_ptr()" for name in names)
            self.lines.append(f"if ({pointers}) % {ALIGNED} or is_watched(): return slow({', '.join(names)})")
            self.lines.append(f"stream = stream_of({device.index or 0})")

    def function(self) -> Run:
        pooled = self._pool()
        for number, call in enumerate(self.calls):
            if not (isinstance(call, TorchCall) and call.results[0] in pooled):
                self.lines.append(self._line(call, self.launches[number]))
            done = [f"b{buffer}" for buffer, last in self.last.items() if last == number]
            if done:
                self.lines.append(f"del {', '.join(done)}")
        returned = ", ".join("None" if buffer is None else f"b{buffer.number}" for buffer in self.results)
        head = f"def run({', '.join(f'b{buffer.number}' for buffer in self.given)}):"
        text = "\n    ".join([head, *self.lines, f"return ({returned},)"])
        exec(compile(text, "<postlude program>", "exec"), self.names)
        run: Run = self.names["run"]
        return run

    def _last_uses(self) -> dict[int, int]:
        """Buffers that are freed, and the call after which they are."""
        found: dict[int, int] = {}
        for number, call in enumerate(self.calls):
            used = [*buffers_in(call), *(call.results if isinstance(call, TorchCall) else ())]
            found |= {buffer.number: number for buffer in used if buffer is not None}
        for buffer in (*self.given, *self.results):
            if buffer is not None:
                found.pop(buffer.number, None)
        return found

    def _pool(self) -> set[Buffer | None]:
        """Small scratch buffers, which share one allocation per dtype."""
        sharing = Counter(buffer.storage for buffer in made_by(self.calls))
        by_torch = {b for call in self.calls if isinstance(call, TorchCall) for b in buffers_in(call)}
        kept = {buffer for buffer in self.results if buffer is not None}
        pools: dict[str, list[Buffer]] = {}
        for call in self.calls:
            if isinstance(call, TorchCall) and call.function in ALLOCATIONS:
                (buffer,) = made_by([call])
                is_alone = sharing[buffer.storage] == 1 and buffer not in by_torch and buffer not in kept
                if is_alone and 0 < buffer.bytes <= _POOLED:
                    pools.setdefault(buffer.dtype, []).append(buffer)
        for dtype, buffers in pools.items():
            each = _ROUND // item_size(dtype)
            sizes = [-(-math.prod(buffer.shape) // each) * each for buffer in buffers]
            names = ", ".join(f"b{buffer.number}" for buffer in buffers)
            made = f"torch.empty({sum(sizes)}, dtype=torch.{dtype}, device=device)"
            self.lines.append(f"{names}, = torch.split_with_sizes({made}, {self._constant(sizes)})")
        return {buffer for buffers in pools.values() for buffer in buffers}

    def _line(self, call: Call, launch: Kernel | None) -> str:
        if isinstance(call, TorchCall):
            made = [f"b{buffer.number}" if buffer is not None else "_" for buffer in call.results]
            into = "" if call.changes_its_argument and not any(call.results) else f"{', '.join(made)} = "
            if call.function in ALLOCATIONS:
                (buffer,) = made_by([call])
                sizes = f"{buffer.shape}, {buffer.strides}, dtype=torch.{buffer.dtype}, device=device"
                return f"{into}torch.empty_strided({sizes})"
            many = "," if len(made) > 1 or call.function in ("Tensor.unbind", "torch.unbind") else ""
            given = [self._text(item) for item in call.arguments]
            given += [f"{name}={self._text(item)}" for name, item in call.keywords]
            if call.function == "Tensor.__setitem__":
                return f"{given[0]}[{given[1]}] = {given[2]}"
            function = self._constant(_function(call.function))
            return f"{', '.join(made)}{many} = {function}({', '.join(given)})"
        given = [self._text(argument) for argument in call.arguments]
        if not self.bound:
            return f"{self._constant(launch)}({', '.join(given)})"
        if isinstance(call, KernelCall):
            given = [f"{t}.data_ptr()" if isinstance(a, Buffer) else t for t, a in zip(given, call.arguments)]
        return f"{self._constant(self.bound[launch])}(stream, {', '.join(given)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Buffer):
            return f"b{value.number}"
        if isinstance(value, Descriptor):
            made = self._constant(DescriptorLike(value.shape, value.strides, value.block))
            return f"{made}(b{value.buffer.number})"
        if isinstance(value, torch.device):
            return "device"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, tuple):
            return f"({''.join(self._text(item) + ', ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name


@functools.cache
def _function(name: str) -> Any:
    """The function of PyTorch with this name."""
    space, *path = name.split(".")
    roots = {"torch": torch, "F": F, "Tensor": Tensor}
    return functools.reduce(getattr, path, roots[space])
