"""Kernels compiled before they are needed: several at a time, and with errors while PyTorch can still take over.

A plan's program lists every launch. What is on the list is compiled by a pool of threads (Triton's passes, ptxas and
C++ compilers run outside of Python's lock), then loaded.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from postlude.chain import Chain
from postlude.hardware import usable_cores
from postlude.plan.calls import CppCall, CudaCall, KernelCall, Program
from postlude.plan.problem import Problem, empty
from postlude.run.chain_run import Inference, Training
from postlude.run.cpp import kernel_of
from postlude.run.execute import bare
from postlude.run.launch import Launch, arguments_without_memory, cuda_kernel, launch_of

_MOST_THREADS = 16


@dataclass(frozen=True)
class Job:
    """A kernel to be compiled and loaded; equal ones are the same code."""

    key: Any
    build: Callable[[], object] = field(compare=False)


def program_of(chain: Chain, runner: Any, problem: Problem, needs: Sequence[bool]) -> Program:
    """What a runner runs for a problem; `needs` says which slots want a gradient."""
    runner = bare(runner)
    assert isinstance(runner, Inference | Training)
    return runner.program([empty(spec, chain.dims, "meta") for spec in problem.tensors], needs)


def jobs_of(program: Program, device: int) -> list[Job]:
    """Every kernel that a program launches."""
    return list(_jobs((*program.forward, *program.backward), device))


def _jobs(calls: Iterable[Any], device: int) -> Iterator[Job]:
    for call in calls:
        if isinstance(call, CudaCall):
            key = (call.source, call.kernel, call.macros)
            yield Job(key, functools.partial(cuda_kernel, call, device))
        elif isinstance(call, CppCall):
            yield Job((call.text, call.kernel), functools.partial(kernel_of, call))
        elif isinstance(call, KernelCall):
            launch = launch_of(call)
            if hasattr(launch.kernel, "device_caches"):  # not of Triton's interpreter, which compiles nothing
                tensors = arguments_without_memory(call)
                yield Job(launch.key(tensors), functools.partial(_built, launch, tensors))


def on_device(place: str) -> contextlib.AbstractContextManager[object]:
    """Nothing has to be entered for a CPU."""
    return torch.cuda.device(place) if place.startswith("cuda") else contextlib.nullcontext()


def build_all(jobs: Iterable[Job], place: str) -> None:
    """Compiles and loads what is not there yet. An error is left to whoever asks for that kernel again."""
    unique = list(dict.fromkeys(jobs))
    if len(unique) < 2:
        return
    threads = min(_MOST_THREADS, usable_cores(), len(unique))
    begin = functools.partial(torch.cuda.set_device, place) if place.startswith("cuda") else None
    with ThreadPoolExecutor(threads, "postlude-compile", begin) as pool:
        for future in [pool.submit(job.build) for job in unique]:
            future.exception()


def load_all(jobs: Iterable[Job]) -> None:
    """Raises where something cannot be compiled or loaded; what is there already takes no time."""
    for job in dict.fromkeys(jobs):
        job.build()


def _built(launch: Launch, tensors: tuple[Any, ...]) -> None:
    """Compiled and loaded; Triton compiles a launcher in C for each signature as well, which takes half a second."""
    launch.compile(tensors)._init_handles()


def raises_errors() -> bool:
    """True where the user wants errors of ours to raise instead of leaving a chain to PyTorch."""
    return os.environ.get("POSTLUDE_STRICT", "") not in ("", "0")
