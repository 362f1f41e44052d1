"""Sums that go through their producer: identities in float64, gradients, and what they must not be used for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from gpu_plans import planned_for_a_gpu
from machines import H200
from plan.test_lower import CPU, problem
from postlude import reference
from postlude.chain import Chain, Value
from postlude.check import tensors_for
from postlude.plan import Plan, lower, problem_of
from postlude.plan import through as plans
from postlude.plan.problem import Layout
from postlude.plan.rules import THROUGH, rules_of
from postlude.plan.through import Through, through_for
from postlude.run.execute import prepare
from postlude.stages import through

UP = conv(2, (3, 4), 3, transposed=True, stride=2, padding=1, output_padding=1)
CASES: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "features": (
        Builder(0, conv(0, (6, 5))).op("div", 2.0).reduce("sum", "sample", True).op("mul", 1.5).chain(),
        (4, 6),
    ),
    "features, shifted each": (
        Builder(0, conv(0, (6, 5))).op("sub", "channel").op("mul", -1.5).reduce("mean", "sample").chain(),
        (4, 6),
    ),
    "space": (
        Builder(2, conv(2, (3, 4), padding=1)).op("add", "channel").reduce("mean", "space").chain(),
        (2, 3, 5, 6),
    ),
    "space, dilated": (
        Builder(2, dataclasses.replace(conv(2, (3, 4), padding=3), dilation=(2, 2))).reduce("sum", "space").chain(),
        (2, 3, 5, 6),
    ),
    "space, upwards": (Builder(2, UP).op("mul", 0.5).reduce("mean", "space", True).op("relu").chain(), (2, 3, 5, 6)),
    "space, no border": (Builder(3, conv(3, (2, 3))).op("rsub", 1.0).reduce("mean", "space").chain(), (2, 2, 4, 5, 6)),
    "short": (Builder(2, conv(2, (2, 3), 5, padding=2)).reduce("mean", "space").chain(), (2, 2, 2, 3)),
    "all": (Builder(2, conv(2, (3, 4), padding=1)).op("mul", "channel").reduce("sum", "sample").chain(), (2, 3, 5, 6)),
}


def planned(chain: Chain, shape: tuple[int, ...], trains: bool = False) -> Plan:
    given = dataclasses.replace(problem(chain, shape, device="cuda"), needs_grad=trains)
    plan = lower(chain, given, H200, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    return plan


def result_through(chain: Chain, own: Through, tensors: Sequence[Tensor]) -> Tensor:
    """The result of the step that sums or averages, by PyTorch's operators."""
    return through.finished(chain, own, through.produced(chain, own, tensors, by_kernels=False).result, tensors)


@pytest.mark.parametrize("name", CASES)
def test_is_an_identity(name: str) -> None:
    chain, shape = CASES[name]
    tensors = tensors_for(chain, shape, torch.float64)
    plan = planned(chain, shape)
    assert rules_of(plan) == (THROUGH,)
    assert isinstance(plan.own, Through)
    truth = reference.evaluate(chain, tensors)
    ours = result_through(chain, plan.own, tensors)
    torch.testing.assert_close(reference.continue_from(chain, plan.own.reduction, ours, tensors), truth)


def assert_trains(chain: Chain, shape: tuple[int, ...], plan: Plan) -> None:
    """Result and gradients by this plan are float64's."""
    tensors = [tensor.requires_grad_() for tensor in tensors_for(chain, shape, torch.float32)]
    with planned_for_a_gpu():
        ours = prepare(chain, plan)(tensors)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth = reference.evaluate(chain, exact)
    dy = torch.randn(truth.shape)
    torch.testing.assert_close(ours, truth.float(), rtol=1e-4, atol=1e-4)
    for found, wanted in zip(torch.autograd.grad(ours, tensors, dy), torch.autograd.grad(truth, exact, dy.double())):
        torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.interpret
@pytest.mark.parametrize("name", CASES)
def test_runs_and_has_gradients(name: str) -> None:
    assert_trains(*CASES[name], planned(*CASES[name], trains=True))


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["features", "space"])
def test_layouts_that_no_kernel_reads_are_pytorchs(name: str) -> None:
    """A weight that is a transposed view, and a channels-last input."""
    chain, shape = CASES[name]
    layout: Layout = "channels_last" if chain.dims else "contiguous"
    tensors = list(tensors_for(chain, shape, torch.float32, layout=layout))
    if not chain.dims:
        tensors[1] = tensors[1].t().contiguous().t()
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    given = dataclasses.replace(problem_of(tensors), device="cuda", needs_grad=True)
    plan = lower(chain, given, H200, even_if_slower=True)
    assert isinstance(plan, Plan)
    assert isinstance(plan.own, Through)
    with planned_for_a_gpu():
        ours = prepare(chain, plan)(tensors)
    truth, dy = reference.evaluate(chain, tensors), torch.randn(ours.shape)
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-4)
    for found, wanted in zip(torch.autograd.grad(ours, tensors, dy), torch.autograd.grad(truth, tensors, dy)):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, at NaN
def test_a_sample_with_nan_has_the_gradient_that_pytorch_gives() -> None:
    chain, shape = CASES["features"]
    tensors = [tensor.requires_grad_() for tensor in tensors_for(chain, shape, torch.float32)]
    with torch.no_grad():
        tensors[0][1, 2], tensors[0][3, 0] = torch.nan, torch.inf
    plan = planned(chain, shape, trains=True)
    with planned_for_a_gpu():
        ours = prepare(chain, plan)(tensors)
    truth = reference.evaluate(chain, tensors)
    (found,), (wanted,) = (torch.autograd.grad(y.sum(), tensors[:1]) for y in (ours, truth))
    assert wanted.isfinite().all()
    torch.testing.assert_close(found, wanted)


@pytest.mark.interpret
def test_runs_in_training_where_no_tensor_wants_a_gradient() -> None:
    chain, shape = CASES["space, upwards"]
    tensors, plan = tensors_for(chain, shape, torch.float32), planned(chain, shape, trains=True)
    with planned_for_a_gpu():
        ours = prepare(chain, plan)(tensors)
    torch.testing.assert_close(ours, reference.evaluate(chain, tensors), rtol=1e-4, atol=1e-4)


def test_a_tap_that_meets_one_position_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant."""
    honest = through.runs_along

    def wrong(*given: object) -> list[tuple[int, int]]:
        (low, high), *rest = honest(*given)  # type: ignore[arg-type]
        return [(max(0, low - 1), high), *rest]

    monkeypatch.setattr(through, "runs_along", wrong)
    with pytest.raises(AssertionError):
        test_is_an_identity("space, upwards")


def test_infinities_of_a_convolutions_input_stay_where_they_are() -> None:
    chain, shape = CASES["space, no border"]
    tensors = tensors_for(chain, shape, torch.float64)
    tensors[0][0, 0, 0, 0, 0], tensors[0][1, 1, 2, 2, 3] = torch.inf, torch.nan
    tensors[1].abs_()
    truth = reference.evaluate(chain, tensors)
    assert truth.isinf().any()
    torch.testing.assert_close(result_through(chain, Through(2), tensors), truth, equal_nan=True)


@pytest.mark.parametrize("one_sign", [False, True])
def test_infinities_of_a_linear_layers_input_are_pytorchs(one_sign: bool) -> None:
    chain, shape = CASES["features, shifted each"]
    tensors = tensors_for(chain, shape, torch.float64)
    tensors[0][0, 0], tensors[0][1, 1], tensors[0][2, 2] = torch.inf, -torch.inf, torch.nan
    if one_sign:
        tensors[1].abs_()
    truth = reference.evaluate(chain, tensors)
    assert bool(truth.isinf().any()) == one_sign
    torch.testing.assert_close(result_through(chain, Through(3), tensors), truth, equal_nan=True)


def test_an_infinity_where_pytorch_has_none_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant."""
    monkeypatch.setattr(through, "_as_infinite", lambda total, x, weight: total)
    with pytest.raises(AssertionError):
        test_infinities_of_a_linear_layers_input_are_pytorchs(False)


OTHERS = {
    "features scaled each": Builder(0, conv(0, (6, 5))).op("mul", "channel").reduce("sum", "sample").chain(),
    "not affine": Builder(2, conv(2, (3, 4))).op("relu").reduce("mean", "space").chain(),
    "not a sum": Builder(0, conv(0, (6, 5))).reduce("amax", "channels").chain(),
    "a value twice": Builder(2, conv(2, (3, 4))).op("mul", Value(0)).reduce("mean", "space").chain(),
    "strides": Builder(2, conv(2, (3, 4), stride=2)).reduce("mean", "space").chain(),
    "no producer": Builder(2).op("mul", 2.0).reduce("mean", "space").chain(),
    "a full tensor": Builder(2, conv(2, (3, 4))).op("add", "full").reduce("mean", "space").chain(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_is_not_used(name: str) -> None:
    chain = OTHERS[name]
    shape = (4, 6) if not chain.dims else (2, 3, 8, 8)
    assert through_for(chain, problem(chain, shape, device="cuda"), H200.card, even_if_slower=True) is None


def test_small_products_stay() -> None:
    chain, shape = CASES["features"]
    assert through_for(chain, problem(chain, shape, device="cuda"), H200.card) is None


def test_few_samples_do_not_pay_for_reading_a_weight_three_times() -> None:
    """14, 18 and 51 of KernelBench's level 2 with a batch of 32 took three times as long as PyTorch on a CPU."""
    wide = Builder(0, conv(0, (1024, 1024))).reduce("sum", "sample").chain()
    used = {batch: through_for(wide, problem(wide, (batch, 1024)), CPU.card) for batch in (63, 64)}
    assert used == {63: None, 64: plans.Through(1)}


@pytest.mark.parametrize("name", ["features", "space, upwards"])
def test_is_used_on_a_cpu_as_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_OPERATIONS", 1)
    monkeypatch.setattr(plans, "_SAMPLES", 1)
    chain, shape = CASES[name]
    tensors = tensors_for(chain, shape, torch.float32)
    plan = lower(chain, problem_of(tensors), CPU)
    assert isinstance(plan, Plan)
    assert rules_of(plan) == (THROUGH,)
    torch.testing.assert_close(prepare(chain, plan)(tensors), reference.evaluate(chain, tensors))
    assert "by sums of what it would have multiplied" in str(plan)
