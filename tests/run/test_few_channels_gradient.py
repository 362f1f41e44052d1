"""Training through the kernels of few channels: CUDA C++ compiled for the host, Triton by its interpreter."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import BY_NAME, Builder, conv
from kernels.cuda_host.build import HostKernels
from postlude import reference
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.kernels.triton import moments_gradient as kernels
from postlude.moments import Moments
from postlude.plan import Plan, problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.run import launch
from postlude.run.chain_run import Training
from postlude.stages.backward import _of_moments
from postlude.stages.cuts import Partials
from postlude.stages.moments import closed_form, combined_by_pytorch
from postlude.stages.moments_gradient import combined_moments, moments_gradient, table_of
from run.test_gpu import CARD
from run.test_training import gradients, saved_bytes
from tracing import kernel_calls, run_stage

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernels for the host"),
]
SPACE = Builder(2, conv(2, (3, 4), padding=1, bias=False)).norm(2).reduce("mean", "space").chain()
SUM = Builder(2, conv(2, (2, 4), 2)).norm(2, affine=False).reduce("sum", "space", True).chain()
LONGER = Builder(2, conv(2, (3, 4), padding=1)).norm(2).op("mul", "channel").reduce("mean", "space").op("silu").chain()
CHAINS: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "23": (BY_NAME["23 small"].chain, (5, 3, 4, 5, 4)),
    "over space": (SPACE, (3, 3, 5, 4)),
    "sum": (SUM, (3, 2, 4, 5)),
    "longer": (LONGER, (3, 3, 5, 4)),
}
HOPPER = dataclasses.replace(CARD, has_nvrtc=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(lambda: tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def host_kernels(built: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cuda_kernel", lambda call, _: built(call))


def inputs(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    chain, shape = CHAINS[name]
    return [t.requires_grad_() for t in tensors_for(chain, shape, dtype, family="hierarchical")]


def training(name: str, tensors: Sequence[Tensor]) -> Training:
    problem = dataclasses.replace(problem_of(tensors), needs_grad=True)
    plan = lower_for_gpu(CHAINS[name][0], problem, HOPPER, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.gradients.of_both is not None
    few = plan.gradients.of_both
    small = dataclasses.replace(few.both, height=4, warps=2, programs=2)
    gradients = dataclasses.replace(plan.gradients, of_both=dataclasses.replace(few, both=small))
    return Training(dataclasses.replace(plan, gradients=gradients), plan.chain)


def truth(name: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    chain = CHAINS[name][0]
    return gradients(lambda ts: reference.evaluate(chain, ts, dtype=torch.float64), tensors)


# Only the product knows the dtype: one case in 16 bits says as much of it as all.
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [*((name, torch.float32, 1e-5) for name in CHAINS), ("23", torch.float16, 3e-3)],
    ids=str,
)
@pytest.mark.usefixtures("poisoned_memory", "host_kernels")
def test_gradients_are_autograds(name: str, dtype: torch.dtype, tolerance: float) -> None:
    tensors = inputs(name, dtype)
    run = training(name, tensors)
    calls = kernel_calls(run.program(tensors, [True] * len(tensors)).backward)
    assert any(call.kernel == "moments_gradient_kernel" for call in calls) == (name != "longer")
    for ours, true in zip(gradients(run, tensors), truth(name, tensors), strict=True):
        assert (ours.shape, ours.dtype) == (true.shape, dtype)
        atol = tolerance * float(true.abs().max() + 1)
        torch.testing.assert_close(ours.double(), true.double(), rtol=tolerance, atol=atol)


@pytest.mark.parametrize("frozen", [(0,), (1, 3, 4)], ids=str)
@pytest.mark.usefixtures("host_kernels")
def test_frozen_tensors_get_nothing(frozen: tuple[int, ...]) -> None:
    tensors = inputs("23")
    for slot in frozen:
        tensors[slot].requires_grad_(False)
    for ours, true in zip(gradients(training("23", tensors), tensors), truth("23", tensors), strict=True):
        torch.testing.assert_close(ours.double(), true.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("host_kernels")
def test_two_numbers_a_channel_are_kept() -> None:
    tensors = inputs("23")
    assert saved_bytes(training("23", tensors), tensors) == 2 * 8 * 5 * 6


def prepared(name: str) -> tuple[Plan, list[Tensor], Moments]:
    """A plan, its tensors, and the true moments of the convolution's result."""
    chain, _ = CHAINS[name]
    tensors = inputs(name, torch.float64)
    plan = lower_for_gpu(chain, dataclasses.replace(problem_of(inputs(name)), needs_grad=True), HOPPER, True)
    assert isinstance(plan, Plan)
    v = reference.evaluate(dataclasses.replace(chain, steps=()), tensors).detach().flatten(2)
    return plan, tensors, Moments(v.mean(2), v.var(2, unbiased=False), v.shape[2])


@pytest.mark.parametrize("name", ["23", "over space", "sum"])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e20])
def test_the_table_is_autograds(name: str, size: float) -> None:
    """The closed form against the gradient that PyTorch takes through the same moments."""
    plan, tensors, moments = prepared(name)
    assert moments.variance is not None
    y = reference.evaluate(plan.chain, tensors).detach()
    dy = torch.randn_like(y) * size
    needs = [True] * len(tensors)
    mean, variance, positions = moments.mean, moments.variance, moments.positions

    def by_autograd(mean: Tensor, variance: Tensor, dy: Tensor, *tensors: Tensor) -> Any:
        return _of_moments(plan, tensors, Moments(mean, variance, positions), dy, needs)

    def by_ours(mean: Tensor, variance: Tensor, dy: Tensor, *tensors: Tensor) -> Any:
        return moments_gradient(plan, Moments(mean, variance, positions), dy, tensors, needs)

    given = [tensor.detach() for tensor in (mean, variance, dy, *tensors)]
    *grads, dmean, dvariance = run_stage(by_autograd, *given)
    assert dmean is not None
    assert dvariance is not None
    slope = 2 * dvariance / moments.positions
    shift = dmean / moments.positions - slope * moments.mean
    if plan.chain.producer is not None and plan.chain.producer.has_bias:
        shift = shift + slope * tensors[2].detach()
        grads[2] = dmean.sum(0)
    theirs = table_of(shift, slope, dmean, moments)
    *found, table = run_stage(by_ours, *given)
    assert table is not None
    torch.testing.assert_close(table, theirs, rtol=1e-5, atol=2.0**15 * 1e-6)  # there dy went through float32
    assert bool((table[..., 2].abs() <= 100).all())
    for ours, true in zip(found[2:], grads[2:], strict=True):
        assert ours is not None
        assert true is not None
        torch.testing.assert_close(ours, true, rtol=1e-6, atol=1e-6 * size)


def test_the_scale_brings_every_gradient_under_its_bound() -> None:
    plan, tensors, moments = prepared("23")
    dy = torch.randn(5, dtype=torch.float64)
    assert moments.variance is not None

    def stage(mean: Tensor, variance: Tensor, dy: Tensor, *tensors: Tensor) -> Tensor:
        return moments_gradient(plan, Moments(mean, variance, moments.positions), dy, tensors, [True] * 5)[1]

    (table,) = run_stage(stage, moments.mean, moments.variance, dy, *(tensor.detach() for tensor in tensors))
    assert table is not None
    chain = dataclasses.replace(plan.chain, steps=())
    x, w, *_ = tensors
    v = torch.nn.functional.conv3d(x, w).detach()
    assert chain.producer is not None
    each = (..., None, None, None)
    scaled = table[..., 0].double()[each] + table[..., 1].double()[each] * v
    assert 2.0**4 < float(scaled.abs().max()) < 2.0**15


def test_combined_moments_are_chans() -> None:
    plan, _, _ = prepared("23")
    batch, channels = plan.value.shape[:2]
    counts = torch.tensor([3.0, 0.0, 9.0]).expand(batch, -1).contiguous()
    partials = Partials(torch.randn(batch, channels, 3), torch.rand(batch, channels, 3), counts)
    spec = dataclasses.replace(plan.value, shape=(batch, channels, 12))
    partials.means[..., 1] = partials.squares[..., 1] = 0

    def of(moments: Moments) -> tuple[Tensor, Tensor | None]:
        return moments.mean, moments.variance

    ours = run_stage(lambda *given: of(combined_moments(spec, Partials(*given))), *partials)
    theirs = run_stage(lambda *given: of(combined_by_pytorch(spec, True, Partials(*given))), *partials)
    torch.testing.assert_close(ours, theirs)


def test_only_a_norm_and_a_reduction_have_a_closed_form() -> None:
    assert closed_form(CHAINS["23"][0].steps) is not None
    assert closed_form(CHAINS["longer"][0].steps) is None


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("dmean + apart * (2.0 * dspread / C_PER_GROUP)[:, None]", "dmean"),  # the spread as if it were a constant
        ("(mean - bias[None, :])", "mean"),  # the bias forgotten
        ("2.0 * dspread / C_PER_GROUP / positions", "dspread / C_PER_GROUP / positions"),
    ],
)
def test_a_mutant_is_seen_to_fail(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch, mutated: Callable) -> None:  # type: ignore[type-arg]
    monkeypatch.setattr(kernels, "moments_gradient_kernel", mutated(right, wrong))
    with pytest.raises(AssertionError):
        test_the_table_is_autograds("23", 1.0)


@pytest.fixture
def mutated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], object]:
    import importlib.util
    from pathlib import Path

    def make(right: str, wrong: str) -> object:
        text = Path(kernels.__file__).read_text()
        assert text.count(right) == 1, right
        path = tmp_path_factory.mktemp("mutant") / "mutant.py"
        path.write_text(text.replace(right, wrong))
        spec = importlib.util.spec_from_file_location("mutant", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.moments_gradient_kernel

    return make
