"""Kernels compiled before they are needed: several at a time, and with errors while PyTorch can still take over.

A plan is called once on tensors of the meta device, forward and backward, with its launches listed instead of made.
What is on the list is compiled by a pool of threads (Triton's passes and ptxas run outside of Python's lock), then
loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Chain
from postlude.hardware import usable_cores
from postlude.plan.problem import Problem, Spec, memory_format
from postlude.run.collecting import collected
from postlude.run.launch import Launch

Job = tuple[Launch, tuple[Any, ...]]  # a launch and its arguments
_MOST_THREADS = 16


def jobs_of(chain: Chain, runner: Any, problem: Problem, needs: Sequence[bool]) -> list[Job]:
    """Every kernel that a call for this problem launches; `needs` says which slots want a gradient."""
    leaves = [_empty(spec, chain.dims).requires_grad_(need) for spec, need in zip(problem.tensors, needs)]
    with collected() as jobs, torch.set_grad_enabled(problem.needs_grad), torch.autocast(problem.device, enabled=False):
        result = runner(leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if problem.needs_grad and wanted and result.requires_grad:
            torch.autograd.grad(result, wanted, torch.empty_like(result), allow_unused=True)
    return jobs


def compile_all(jobs: Iterable[Job]) -> None:
    """Compiles and loads what is not compiled yet. An error is left to whoever asks for that kernel again."""
    unique = list({launch.key(tensors): (launch, tensors) for launch, tensors in jobs}.values())
    unique = [job for job in unique if hasattr(job[0].kernel, "device_caches")]  # not those of Triton's interpreter
    if len(unique) < 2:
        return
    device = torch.cuda.current_device()
    threads = min(_MOST_THREADS, usable_cores(), len(unique))
    with ThreadPoolExecutor(threads, "postlude-compile", torch.cuda.set_device, (device,)) as pool:
        for future in [pool.submit(_built, launch, tensors) for launch, tensors in unique]:
            future.exception()


def load_all(jobs: Iterable[Job]) -> None:
    """Loads what is on the list into the current device, and raises where something cannot be compiled or loaded."""
    for launch, tensors in {launch.key(tensors): (launch, tensors) for launch, tensors in jobs}.values():
        if hasattr(launch.kernel, "device_caches"):
            _built(launch, tensors)


def _built(launch: Launch, tensors: tuple[Any, ...]) -> None:
    """Compiled and loaded; Triton compiles a launcher in C for each signature as well, which takes half a second."""
    launch.compile(tensors)._init_handles()


def raises_errors() -> bool:
    """True where the user wants errors of ours to raise instead of leaving a chain to PyTorch."""
    return os.environ.get("POSTLUDE_STRICT", "") not in ("", "0")


def _empty(spec: Spec, dims: int) -> Tensor:
    has_layout = len(spec.shape) == dims + 2
    layout = memory_format(spec.layout if has_layout else "contiguous", dims)
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta", memory_format=layout)
