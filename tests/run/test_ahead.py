"""A plan on tensors without values lists the kernels that it launches on real ones, all of them and no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import BY_NAME
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.export.export_model import HOPPER
from postlude.plan import Plan, lower
from postlude.plan.problem import Problem, spec_of
from postlude.run import ahead
from postlude.run.execute import prepare
from postlude.run.launch import Launch, arguments_without_memory, launch_of
from tracing import kernel_calls

pytestmark = pytest.mark.interpret


def _problem(tensors: Sequence[Tensor], precision: str, trains: bool) -> Problem:
    return Problem(tuple(map(spec_of, tensors)), "cuda", precision, trains)


def _cases() -> list[Any]:
    return [
        pytest.param(case.chain, case.shape, trains, id=f"{name}{' trained' if trains else ''}")
        for name, case in BY_NAME.items()
        if case.chain.dims == 3 and "running" not in case.chain.roles
        for trains in (False, True)
    ][:40]


@pytest.mark.parametrize(("chain", "shape", "trains"), _cases())
def test_the_list_is_what_is_launched(
    chain: Chain, shape: tuple[int, ...], trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_for(chain, shape, torch.float32, "cpu", 0, "normal", "contiguous")
    problem = _problem(tensors, "fp32", trains)
    plan = lower(chain, problem, HOPPER_WITHOUT_NVRTC, even_if_slower=True)
    if not isinstance(plan, Plan):
        pytest.skip(str(plan))
    needs = [trains and role != "running" for role in chain.roles]
    program = ahead.program_of(chain, prepare(chain, plan), problem, needs)
    calls = kernel_calls((*program.forward, *program.backward))
    listed = [(launch_of(call), arguments_without_memory(call)) for call in calls]
    made: list[Any] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *given: made.append((self, given)))
    leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needs)]
    with torch.set_grad_enabled(trains):
        result = prepare(chain, plan)(leaves)
        if trains:
            torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True)
    assert [_code(*job) for job in listed] == [_code(*job) for job in made]
    assert listed


def _code(launch: Launch, given: tuple[Any, ...]) -> tuple[Any, ...]:
    kernel, kinds, *rest = launch.key(given)
    kinds = [kind[0] if isinstance(kind, tuple) and isinstance(kind[0], torch.dtype) else kind for kind in kinds]
    return kernel.__name__, kinds, launch.numbers, *rest


HOPPER_WITHOUT_NVRTC = HOPPER.__class__(**{**vars(HOPPER), "has_nvrtc": False})


def test_a_launch_that_is_listed_is_not_made() -> None:
    chain, shape = BY_NAME["61 small"].chain, BY_NAME["61 small"].shape
    tensors = tensors_for(chain, shape, torch.float32, "cpu", 0, "normal", "contiguous")
    plan = lower(chain, _problem(tensors, "fp32", False), HOPPER_WITHOUT_NVRTC, even_if_slower=True)
    assert isinstance(plan, Plan)
    runner = prepare(chain, plan)
    program = ahead.program_of(chain, runner, _problem(tensors, "fp32", False), [False] * len(tensors))
    assert ahead.jobs_of(program, 0) == []  # the interpreter compiles nothing
    with torch.no_grad():  # and is made afterwards
        assert bool(runner(tensors).isfinite().all())


def test_cudnns_own_operators_run_without_memory_too() -> None:
    """A convolution in another precision than PyTorch's switch says is cuDNN's operator, which has no meta kernel."""
    case = BY_NAME["61 small"]
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cpu", 0, "normal", "contiguous")
    problem = Problem(tuple(map(spec_of, tensors)), "cuda", "fp32", False, allows_tf32=True, convolution="pytorch")
    plan = lower(case.chain, problem, HOPPER_WITHOUT_NVRTC, even_if_slower=True)
    assert isinstance(plan, Plan)
    assert plan.library_tf32 is False
    program = ahead.program_of(case.chain, prepare(case.chain, plan), problem, [False] * len(tensors))
    assert kernel_calls(program.forward)[-1].kernel.endswith("finish_kernel")
