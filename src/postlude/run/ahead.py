"""Compiles kernels before they are needed: several at a time, and while PyTorch can still take over if one fails.

A plan's program lists every launch. A pool of threads compiles the kernels (Triton's passes, ptxas and C++ compilers
release the GIL). Nobody waits for all of them: a chain is loaded and checked while those of the next are compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from postlude.chain import Chain
from postlude.hardware import usable_cores
from postlude.plan.problem import Problem, empty
from postlude.plan.program import CppCall, CudaCall, KernelCall, Program
from postlude.run.chain_run import Inference, Training
from postlude.run.cpp import kernel_of
from postlude.run.launch import Launch, arguments_without_memory, cuda_kernel, launch_of

_MOST_THREADS = 16


@dataclass(frozen=True)
class Job:
    """A kernel to be compiled and loaded; equal jobs have the same code."""

    key: Any
    build: Callable[[], object] = field(compare=False)


_STARTED: dict[tuple[str, Job], Future[object]] = {}  # by device and job, until somebody loads it


def program_of(chain: Chain, runner: Any, problem: Problem, needs: Sequence[bool]) -> Program:
    """The program that a runner executes for a problem; `needs` says which slots need a gradient."""
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
            if hasattr(launch.kernel, "device_caches"):  # Triton's interpreter has none and compiles nothing
                tensors = arguments_without_memory(call)
                yield Job(launch.key(tensors), functools.partial(_built, launch, tensors))


def on_device(place: str) -> contextlib.AbstractContextManager[object]:
    """Makes a CUDA device current; does nothing for a CPU."""
    return torch.cuda.device(place) if place.startswith("cuda") else contextlib.nullcontext()


def start_all(jobs: Iterable[Job], place: str) -> None:
    """Begins to compile and load what is not loaded yet, in threads. Errors show when a kernel is loaded."""
    unique = [job for job in dict.fromkeys(jobs) if (place, job) not in _STARTED]
    if not unique:
        return
    threads = min(_MOST_THREADS, usable_cores(), len(unique))
    begin = functools.partial(torch.cuda.set_device, place) if place.startswith("cuda") else None
    pool = ThreadPoolExecutor(threads, "postlude-compile", begin)
    _STARTED.update({(place, job): pool.submit(job.build) for job in unique})
    pool.shutdown(wait=False)


def load_all(jobs: Iterable[Job], place: str) -> None:
    """Compiles and loads the kernels, and raises if one fails. Those that are loaded already take no time."""
    jobs = list(dict.fromkeys(jobs))
    if len(jobs) > 1:
        start_all(jobs, place)
    with on_device(place):
        for job in jobs:
            started = _STARTED.pop((place, job), None)
            if started is not None:
                started.exception()  # waits; what failed raises here once more
            job.build()


def _built(launch: Launch, tensors: tuple[Any, ...]) -> None:
    """Compiles and loads a kernel. Triton also compiles a C launcher per signature, which takes half a second."""
    launch.compile(tensors)._init_handles()
