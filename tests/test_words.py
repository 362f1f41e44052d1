"""Every word of the vocabulary, on both devices' code, forward and backward: PyTorch's numbers, ties, NaN and ±∞."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import WORDS, Case
from machines import SMALL_H200
from postlude import hardware, reference
from postlude.chain import Pointwise, Scalar, Slot, Value
from postlude.check import tensors_for
from postlude.plan import Plan, lower, problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.run.execute import execute

INF, NAN = float("inf"), float("nan")
POINTS = [
    *(0.0, -0.0, 0.1, 0.1 - 1e-12, -0.1, 1.0, -1.0, 3.0, -3.0, 6.0, 0.3, -0.5),
    *(NAN, INF, -INF, 800.0, -800.0, 30.0, -30.0, 1e-3, -1e-3, 1e-30, -1e-30, 20.0),
    *(0.1, -2.0, 2.0, 5.0, -5.0, 0.7, 1.5, -1.5, 2.5, -2.5, 9.0, -9.0),
]
CARD = SMALL_H200
named = pytest.mark.parametrize("case", WORDS, ids=lambda c: c.name)
DTYPES = ((torch.float64, 1e-14), (torch.float32, 2e-6))
ROUGH = {"hardsigmoid": 1e-7, "hardswish": 1e-7}  # PyTorch multiplies by a sixth in fp32, in float64 too


def tensors_of(case: Case, dtype: torch.dtype, points: list[float] = POINTS) -> list[Tensor]:
    """The points, together with operands that tie with some of them."""
    _, *others = tensors_for(case.chain, case.shape, dtype)
    for slot, other in enumerate(others, 1):
        if case.chain.roles[slot] == "full":
            other.copy_(torch.tensor(points, dtype=dtype).roll(1).reshape(case.shape))
            other.view(-1)[::2] = torch.tensor(points, dtype=dtype)[::2]
        elif case.chain.roles[slot] == "one":
            other.fill_(0.1)
    return [torch.tensor(points, dtype=dtype).reshape(case.shape), *others]


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_in_place_on_the_cpu_is_pytorchs_to_the_bit(case: Case, dtype: torch.dtype) -> None:
    # Once times 1, which makes a value of ours that the word may overwrite.
    step = case.chain.steps[0]
    assert isinstance(step, Pointwise)
    again = dataclasses.replace(step, operands=(Value(1), *step.operands[1:]))
    chain = dataclasses.replace(case.chain, steps=(Pointwise("mul", (Value(0), Scalar(1.0))), again))
    tensors = tensors_of(case, dtype)
    before = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        plan = lower(chain, problem_of(tensors), hardware.machine_for("cpu"), even_if_slower=True)
        assert isinstance(plan, Plan), plan
        ours, theirs = execute(chain, plan, tensors), reference.evaluate(case.chain, tensors)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    for now, then in zip(tensors, before):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


@named
@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore")
def test_ties_infinities_and_nan_are_pytorchs_on_the_card(case: Case) -> None:
    values_agree(case, "cpu")


@named
@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore")
def test_gradients_at_ties_infinities_and_nan_are_pytorchs(case: Case) -> None:
    gradients_agree(case, "cpu")


@named
@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore")
def test_numerical_differentiation_agrees(case: Case) -> None:
    """Our forward pass differentiated numerically against our backward pass, for all elements at once."""
    from tracing import run_plan

    step, points = 1e-6, [0.37 * number - 6.6 for number in range(36)]  # none within a step of a tie
    low, high, middle = (tensors_of(case, torch.float64, [p + shift for p in points]) for shift in (-step, step, 0.0))
    plan = plan_for(case, middle)
    if case.chain.roles[-1] == "full":
        for tensors in (low, high, middle):
            tensors[1] = torch.linspace(1.0, 2.0, 36, dtype=torch.float64).reshape(case.shape)
    with torch.no_grad():
        slopes = (run_plan(plan, high) - run_plan(plan, low)) / (2 * step)
    dv, *_ = gradients(case, middle)
    dy = torch.linspace(0.5, 1.5, 36).double().reshape(case.shape)
    expected = torch.zeros_like(dv) if case.name == "detach" else slopes * dy
    torch.testing.assert_close(dv, expected, rtol=1e-6, atol=1e-8, equal_nan=True)


@named
@pytest.mark.gpu
def test_a_real_card_agrees_with_pytorchs_own_kernels_on_it(case: Case) -> None:
    values_agree(case, "cuda")
    gradients_agree(case, "cuda")


def values_agree(case: Case, device: str) -> None:
    from tracing import run_plan

    for dtype, tolerance in DTYPES:
        tensors = [tensor.to(device) for tensor in tensors_of(case, dtype)]
        with torch.no_grad():
            ours = run_plan(plan_for(case, tensors), tensors)
            x, *others = (tensor.cpu() for tensor in tensors)  # on a card a sixth in fp32 is in both "hard" words
            truth = reference.evaluate(case.chain, [spread_out(x), *others], dtype=torch.float64)
        theirs = truth.to(device, dtype)
        least = tolerance * (0.1 if case.name == "gelu" else 0.01)  # 1 + erf(x) cancels, as PyTorch's does
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=least, equal_nan=True)


def gradients_agree(case: Case, device: str) -> None:
    finite = [point if abs(point) < 100 else 0.25 for point in POINTS]  # sums over a channel would drown in the others
    for dtype, usual in DTYPES:
        tolerance = max(usual, ROUGH.get(case.name, 0.0))
        dv, _, right, _ = gradients(case, [t.to(device) for t in tensors_of(case, dtype)])
        torch.testing.assert_close(dv, right, rtol=tolerance, atol=tolerance, equal_nan=True)
        dv, found, right, slots = gradients(case, [t.to(device) for t in tensors_of(case, dtype, finite)])
        torch.testing.assert_close(dv, right, rtol=tolerance, atol=tolerance, equal_nan=True)
        for slot, gradient in slots.items():
            torch.testing.assert_close(found[slot], gradient, rtol=8 * tolerance, atol=8 * tolerance, equal_nan=True)


def gradients(case: Case, tensors: list[Tensor]) -> tuple[Tensor, dict[int, Any], Tensor, dict[int, Tensor]]:
    from postlude.stages.gradient import gradient_passes
    from tracing import run_stage

    plan = plan_for(case, tensors)
    slots = [operand.index for operand in case.chain.steps[0].operands if isinstance(operand, Slot)]  # type: ignore[union-attr]
    dy = torch.linspace(0.5, 1.5, tensors[0].numel()).to(tensors[0]).reshape(case.shape)

    def stage(dy: Tensor, *tensors: Tensor) -> list[Tensor]:
        dv, found = gradient_passes(plan, frozenset(slots), tensors[0], None, dy, tensors)
        return [dv, *(found[slot] for slot in slots)]

    dv, *found = run_stage(stage, dy, *tensors)
    assert dv is not None
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    result = reference.evaluate(case.chain, [spread_out(leaves[0]), *leaves[1:]])
    right: Any = [torch.zeros_like(leaf) for leaf in leaves]
    if result.requires_grad:
        right = torch.autograd.grad(result, leaves, dy, allow_unused=True, materialize_grads=True)
    return dv, dict(zip(slots, found)), right[0], {slot: right[slot] for slot in slots}


def spread_out(x: Tensor) -> Tensor:
    """Every other element of memory: PyTorch's vectorised code on the CPU differs from its own scalar code, which is
    what its CUDA kernels have, at NaN (hardtanh's, elu's and hardswish's gradients) and at ∞ (gelu)."""
    return torch.stack((x, x), -1)[..., 0]


def plan_for(case: Case, tensors: list[Tensor]) -> Plan:
    with torch.no_grad():
        plan = lower_for_gpu(case.chain, problem_of(tensors), CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    return plan
