"""Stages and programs in tests: traced on the shapes of real tensors, then run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from postlude.plan import Plan
from postlude.plan.passes import KeepMoments
from postlude.plan.program import Call, KernelCall, Program
from postlude.run.chain_run import Inference
from postlude.run.launch import Launch, arguments_without_memory, launch_of
from postlude.run.runner import runner_of
from postlude.stages.program import given_by, inference_program, training_program
from postlude.stages.trace import Tracer, empty_strided


def run_plan(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
    """The forward pass of a plan's own chain."""
    return Inference(plan, plan.chain)(tensors)


def storing_raw(plan: Plan) -> Plan:
    """The same plan, with the convolution's result as it is in memory between the passes."""
    if not plan.resumes_at:
        return plan
    first, last = plan.passes[0], plan.passes[-1]
    passes = (replace(first, sink=KeepMoments(True, stores=True)), replace(last, first=1))
    return replace(plan, passes=passes)


def run_stage(stage: Callable[..., Any], *tensors: Tensor) -> tuple[Tensor | None, ...]:
    """What a stage gives for these tensors: every tensor of its results, nested ones one after the other."""
    given = [empty_strided(tensor) for tensor in tensors]
    tracer = Tracer()
    slots = [tracer.buffer(tensor, "given") for tensor in given]
    with torch.no_grad(), tracer:
        results = flat(stage(*given))
    ends = [None if result is None else tracer.buffer(result) for result in results]
    return runner_of(slots, tracer.calls, ends, str(tensors[0].device))(*tensors)


def traced_calls(stage: Callable[..., Any], *tensors: Tensor) -> list[Call]:
    """The calls of a stage for tensors like these."""
    given = [empty_strided(tensor) for tensor in tensors]
    with torch.no_grad(), Tracer() as tracer:
        stage(*given)
    return tracer.calls


def program_of(plan: Plan, tensors: Sequence[Tensor], needs: Sequence[bool] | None = None) -> Program:
    """The program of the plan's own chain; with `needs`, for training."""
    given = given_by(tensors)
    return inference_program(plan, plan.chain, given) if needs is None else training_program(plan, given, tuple(needs))


def kernel_calls(calls: Iterable[Call]) -> list[KernelCall]:
    return [call for call in calls if isinstance(call, KernelCall)]


def compiled(call: KernelCall) -> tuple[Launch, Any]:
    """A call's launch, and what Triton compiles for it on the card that is active."""
    launch = launch_of(call)
    given = (*arguments_without_memory(call), *launch.numbers)
    return launch, launch.kernel.warmup(*given, **launch.constants, num_warps=launch.warps, grid=launch.grid)


def flat(item: Any) -> list[Tensor | None]:
    if item is None or isinstance(item, Tensor):
        return [item]
    if isinstance(item, dict):
        return flat(list(item.values()))
    return [tensor for part in item for tensor in flat(part)]
