"""The CPU path against float64, for every case, layout and dtype; and the ways in which it could go wrong."""

from __future__ import annotations

import copy
import dataclasses
import threading

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cases import BY_NAME, CASES, Builder, Case, conv
from postlude import hardware, moments, reference
from postlude.chain import Chain, Pointwise, Scalar, Value
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.plan import cpu as plan_cpu
from postlude.run import onednn
from postlude.run.execute import execute

SMALL_CACHE = hardware.Machine("cpu", 2, 16 << 10, False, hardware.has_onednn())  # forces several slabs
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(params=["as planned", "large values"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small values take the ways of large ones too: slabs in a buffer or called directly, norms in place."""
    if request.param == "large values":
        monkeypatch.setattr(plan_cpu, "MAPPED", 0)
        monkeypatch.setattr(plan_cpu, "SURELY_MAPPED", 0)
    return str(request.param)


def fused(chain: Chain, tensors: list[Tensor], machine: hardware.Machine = SMALL_CACHE) -> Tensor:
    with torch.no_grad():
        plan = lower(chain, problem_of(tensors), machine, even_if_slower=True)
        assert isinstance(plan, Plan), plan
        return execute(chain, plan, tensors)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.usefixtures("poisoned_memory", "way")
def test_is_right_by_the_rule(case: Case, layout: str) -> None:
    points = chain_points(case.chain, case.shape, torch.float32, "cpu", layout=layout)
    verdict = verify_chain(fused, case.chain, points)
    assert verdict.right, verdict


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_is_right_in_bfloat16_and_float64(case: Case) -> None:
    verdict = verify_chain(fused, case.chain, chain_points(case.chain, case.shape, torch.bfloat16, "cpu"))
    assert verdict.right, verdict
    tensors = tensors_for(case.chain, case.shape, torch.float64, "cpu", 0, "normal", "contiguous")
    torch.testing.assert_close(
        fused(case.chain, tensors), reference.evaluate(case.chain, tensors), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.usefixtures("way")
def test_dtype_shape_and_strides_are_pytorchs(case: Case, layout: str) -> None:
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cpu", 0, "normal", layout)
    for machine in (SMALL_CACHE, hardware.machine_for("cpu")):
        ours, theirs = fused(case.chain, tensors, machine), reference.evaluate(case.chain, tensors)
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.usefixtures("way")
def test_the_callers_tensors_are_left_alone(case: Case) -> None:
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cpu", 0, "normal", "contiguous")
    before = copy.deepcopy(tensors)
    fused(case.chain, tensors)
    for slot, (now, then) in enumerate(zip(tensors, before)):
        if slot not in case.chain.moved:
            torch.testing.assert_close(now, then, rtol=0, atol=0)


def test_a_value_far_from_zero_is_centred_before_it_is_squared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: never centre, and the variance cancels."""
    value = torch.randn(2, 3, 4, 5, 6) + 1000.0
    truth = value.double().flatten(2).var(2, correction=0)
    honest, _ = moments.channel_moments(value.clone(), squares=True, overwrite=True)
    monkeypatch.setattr(moments, "_FAR", float("inf"))
    mutant, _ = moments.channel_moments(value.clone(), squares=True, overwrite=True)
    last = value.contiguous(memory_format=torch.channels_last_3d)
    also, _ = moments.channel_moments(last, squares=True, overwrite=True)
    assert honest.variance is not None
    assert mutant.variance is not None
    assert also.variance is not None
    torch.testing.assert_close(honest.variance, truth, rtol=1e-5, atol=0)
    torch.testing.assert_close(also.variance, truth, rtol=1e-4, atol=0)
    assert (mutant.variance - truth).abs().max() > 1e-2


def test_the_mean_of_a_value_far_from_zero_is_not_rounded() -> None:
    """Short runs are added in fp32: seven times 0.1 divided by 7 is another number, until the rest is added."""
    value = torch.full((1, 2, 1, 7), 0.1)
    found, centre = moments.channel_moments(value.clone(), squares=True, overwrite=True)
    assert found.variance is not None
    torch.testing.assert_close(found.mean, torch.full((1, 2), 0.1).double(), rtol=1e-14, atol=0)
    assert float(found.variance.abs().max()) < 1e-16
    assert (value[0, 0, 0, 0].double() - centre).abs().max() < 1e-8


def test_moments_plans_keep_at_most_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["23 small"]
    tensors = tensors_for(case.chain, (32, 3, 6, 7, 8), torch.float32, "cpu", 0, "normal", "contiguous")
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result._base is None:
                largest = max(largest, result.numel())
            return result

    with Watch():
        fused(case.chain, tensors)
    value = 32 * 6 * 4 * 5 * 6
    assert 0 < largest <= value // 4


def test_an_in_place_step_never_overwrites_a_value_that_is_read_again() -> None:
    """Mutant: forget last uses, and `value used twice` goes wrong."""
    case = BY_NAME["value used twice"]
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cpu", 0, "normal", "contiguous")
    truth = reference.evaluate(case.chain, tensors, dtype=torch.float64)
    assert (fused(case.chain, tensors) - truth).abs().max() < 1e-4

    class Forgetful(Chain):
        @property
        def last_uses(self) -> dict[int, int]:  # type: ignore[override]
            return dict(zip(range(len(self.steps) + 1), range(1, len(self.steps) + 2)))

    forgetful = Forgetful(*(getattr(case.chain, f.name) for f in dataclasses.fields(Chain)))
    with pytest.raises((AssertionError, RuntimeError)):
        assert (fused(forgetful, tensors) - truth).abs().max() < 1e-4


@pytest.mark.usefixtures("way")
def test_a_detached_value_keeps_what_it_was() -> None:
    """detach gives another tensor over the same memory: writing to one would change the other."""
    steps = (
        Pointwise("detach", (Value(0),)),
        Pointwise("add", (Value(0), Scalar(1.0))),
        Pointwise("mul", (Value(2), Value(1))),
    )
    chain = Chain(2, conv(2, (3, 4), bias=False), steps, ("input", "weight"))
    tensors = list(tensors_for(chain, (2, 3, 6, 7), torch.float32))
    torch.testing.assert_close(fused(chain, tensors), reference.evaluate(chain, tensors))


@pytest.mark.parametrize("dims", [2, 3])
def test_a_pool_keeps_pytorchs_strides(dims: int) -> None:
    chain = Builder(dims, conv(dims, (3, 5))).op("relu").reduce("adaptive_avg_pool", "space", True).chain()
    tensors = list(tensors_for(chain, (3, 3, *[7] * dims), torch.float32, layout="channels_last"))
    assert fused(chain, tensors).stride() == reference.evaluate(chain, tensors).stride()


def test_memory_kept_in_inference_mode_serves_outside_of_it() -> None:
    case = BY_NAME["conv relu mean over space"]
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cpu", 0, "normal", "channels_last")
    onednn._kept = threading.local()
    with torch.inference_mode():
        inside = fused(case.chain, tensors, hardware.machine_for("cpu"))
    torch.testing.assert_close(fused(case.chain, tensors, hardware.machine_for("cpu")), inside, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("builder", "reason"),
    [
        (Builder(2, conv(2, (3, 4), 1, transposed=True, stride=2, output_padding=1)), "writes outside of its result"),
        (Builder(2, conv(2, (3, 4), 1, stride=2, padding=1)), "wider than the kernel's reach"),
    ],
)
def test_what_pytorchs_own_convolution_gets_wrong_is_not_planned(builder: Builder, reason: str) -> None:
    """On paper alone: running them corrupts the heap or crashes."""
    chain = builder.op("relu").norm(2).chain()
    tensors = tensors_for(chain, (2, 3, 5, 5), torch.float32)
    refusal = lower(chain, problem_of(tensors), SMALL_CACHE, even_if_slower=True)
    assert reason in str(refusal)
