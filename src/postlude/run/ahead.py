"""Kernels compiled before they are needed: several at a time, and with errors while PyTorch can still take over.

A plan is called once on tensors of the meta device, forward and backward, with its launches listed instead of made.
What is on the list is compiled by a pool of threads (Triton's passes and ptxas run outside of Python's lock), then
loaded.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from postlude.chain import Chain
from postlude.hardware import usable_cores
from postlude.plan.problem import Problem, empty
from postlude.run.launch import Launch
from postlude.run.recording import Recording, WithoutMemory, recorded_by

_MOST_THREADS = 16


@dataclass(frozen=True)
class Job:
    """A kernel to be compiled and loaded; equal ones are the same code."""

    key: Any
    build: Callable[[], object] = field(compare=False)


class _Jobs(Recording):
    def __init__(self, device: int) -> None:
        self.device = device
        self.found: list[Job] = []

    def kernel(self, launch: Launch, tensors: tuple[Any, ...]) -> None:
        if hasattr(launch.kernel, "device_caches"):  # not of Triton's interpreter, which compiles nothing
            self.found.append(Job(launch.key(tensors), functools.partial(_built, launch, tensors)))

    def cuda(self, source: str, kernel: str, ready: Any, _: Any) -> None:
        key = (source, kernel, *ready.macros.items())
        self.found.append(Job(key, functools.partial(ready.load, self.device)))


def jobs_of(chain: Chain, runner: Any, problem: Problem, needs: Sequence[bool]) -> list[Job]:
    """Every kernel that a call for this problem launches; `needs` says which slots want a gradient."""
    jobs = _Jobs(problem.index)
    called(runner, chain, problem, needs, jobs)
    return jobs.found


def called(runner: Any, chain: Chain, problem: Problem, needs: Sequence[bool], taker: Recording) -> None:
    """Calls a plan's runner, forward and backward, on tensors without memory; `taker` takes its launches down."""
    leaves = [empty(spec, chain.dims, "meta").requires_grad_(need) for spec, need in zip(problem.tensors, needs)]
    off = torch.autocast(problem.device, enabled=False)
    with recorded_by(taker), WithoutMemory(), torch.set_grad_enabled(problem.needs_grad), off:
        result = runner(leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if problem.needs_grad and wanted and result.requires_grad:
            torch.autograd.grad(result, wanted, torch.empty_like(result), allow_unused=True)


def build_all(jobs: Iterable[Job]) -> None:
    """Compiles and loads what is not there yet. An error is left to whoever asks for that kernel again."""
    unique = list(dict.fromkeys(jobs))
    if len(unique) < 2:
        return
    device = torch.cuda.current_device()
    threads = min(_MOST_THREADS, usable_cores(), len(unique))
    with ThreadPoolExecutor(threads, "postlude-compile", torch.cuda.set_device, (device,)) as pool:
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
