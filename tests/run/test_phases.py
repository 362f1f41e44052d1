"""Our convolution by phase, and without a norm, by Triton's interpreter: against float64, and at infinities."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from postlude import reference
from postlude.chain import Chain, Convolution
from postlude.check import tensors_for
from postlude.plan import Plan, phases, problem_of
from postlude.plan.gemm import Gemm
from postlude.plan.gpu import lower_for_gpu
from postlude.run.chain_run import Training
from run.test_gpu import CARD
from tracing import run_plan
from wrong_kernels import replace_text

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
Sizes = tuple[int, ...]
FLAT: dict[str, tuple[Sizes, Sizes, Sizes, Sizes]] = {  # kernel, stride, padding, output_padding
    "k3s2p1op1": ((3, 3), (2, 2), (1, 1), (1, 1)),
    "k3s2p1": ((3, 3), (2, 2), (1, 1), (0, 0)),
    "k4s2p1": ((4, 4), (2, 2), (1, 1), (0, 0)),
    "k4s2": ((4, 4), (2, 2), (0, 0), (0, 0)),
    "k4s2p1op1": ((4, 4), (2, 2), (1, 1), (1, 1)),
    "k2s2": ((2, 2), (2, 2), (0, 0), (0, 0)),
    "k2s2op1": ((2, 2), (2, 2), (0, 0), (1, 1)),  # the last row gets nothing but the bias
    "k5s2p2": ((5, 5), (2, 2), (2, 2), (0, 0)),
    "strides 1 and 3": ((3, 2), (1, 3), (0, 0), (0, 2)),  # a kernel shorter than its stride
    "strides 4 and 1": ((5, 4), (4, 1), (3, 1), (2, 0)),
    "strides 3 and 4": ((4, 6), (3, 4), (2, 0), (1, 3)),
    "k2s2p1": ((2, 2), (2, 2), (1, 1), (0, 0)),
}
DEEP = {
    "3-D k3s2p1op1": ((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    "3-D strides 1, 2, 2": ((1, 3, 2), (1, 2, 2), (0, 1, 0), (0, 0, 1)),
}


def transposed(sizes: tuple[Sizes, Sizes, Sizes, Sizes], bias: bool = True) -> Convolution:
    kernel, stride, padding, more = sizes
    ones = (1,) * len(kernel)
    return Convolution(True, 3, 5, kernel, stride, padding, ones, more, has_bias=bias)


def chains(name: str) -> tuple[Chain, Chain]:
    """With a norm and without, one of them without a bias."""
    sizes = {**FLAT, **DEEP}[name]
    dims, turned = len(sizes[0]), len(name) % 2 == 0
    with_norm = Builder(dims, transposed(sizes, turned)).op("relu").norm(None).op("mul", 2.0).chain()
    return with_norm, Builder(dims, transposed(sizes, not turned)).op("tanh").op("add", "full").chain()


def planned(chain: Chain, tensors: Sequence[Tensor], precision: str = "auto", needs_grad: bool = False) -> Plan:
    tf32 = precision == "tf32"
    given = dataclasses.replace(problem_of(tensors, precision), needs_grad=needs_grad, allows_tf32=tf32)
    plan = lower_for_gpu(chain, given, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert isinstance(plan.own, Gemm)
    return dataclasses.replace(plan, own=dataclasses.replace(plan.own, rows=32))  # several tiles


def run(chain: Chain, tensors: Sequence[Tensor], precision: str = "auto") -> Tensor:
    with torch.no_grad():
        return run_plan(planned(chain, tensors, precision), tensors)


def error(chain: Chain, tensors: Sequence[Tensor], precision: str = "auto") -> float:
    ours, truth = run(chain, tensors, precision), reference.evaluate(chain, tensors, dtype=torch.float64)
    assert ours.shape == truth.shape
    assert ours.dtype == reference.evaluate(chain, tensors).dtype
    off = (ours.double() - truth).abs().max() / truth.abs().max()
    return float(torch.nan_to_num(off, nan=torch.inf))


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.usefixtures("poisoned_memory")
def test_is_right_for_every_kernel_stride_and_padding(name: str) -> None:
    with_norm, without = chains(name)
    rows = [
        (without, "contiguous", torch.float32, "fp32", 1e-5),
        (without, "channels_last", torch.float32, "tf32", 5e-3),
        (with_norm, "channels_last", torch.float32, "fp32", 1e-5),
    ]
    if name in ("k3s2p1op1", "strides 1 and 3"):
        rows += [(without, "channels_last", torch.float16, "auto", 1e-2)]
        rows += [(with_norm, "contiguous", torch.float64, "auto", 1e-10)]
    for chain, layout, dtype, precision, most in rows:
        tensors = tensors_for(chain, (2, 3, 3, 4), dtype, "cpu", 0, "normal", layout)
        assert error(chain, tensors, precision) < most, (layout, dtype)


@pytest.mark.parametrize(("name", "layout"), [*zip(DEEP, ("contiguous", "channels_last"))])
@pytest.mark.usefixtures("poisoned_memory")
def test_is_right_in_three_dimensions(name: str, layout: str) -> None:
    for chain in chains(name):
        tensors = tensors_for(chain, (2, 3, 2, 2, 3), torch.float32, "cpu", 0, "normal", layout)
        assert error(chain, tensors) < 1e-5


def test_only_moments_are_kept_where_no_more_is_needed() -> None:
    """Sums of a chain without a norm, means and squares of one with it; several blocks of channels."""
    how = dataclasses.replace(transposed(FLAT["k3s2p1op1"]), out_channels=70)  # of 64
    for chain in (
        Builder(2, how).op("relu").reduce("mean", "space").chain(),
        Builder(2, how).norm(7).reduce("sum", "space").op("relu").chain(),
    ):
        tensors = tensors_for(chain, (1, 3, 4, 5), torch.float32, "cpu", 0, "normal")
        assert len(planned(chain, tensors).passes) == 1
        assert error(chain, tensors) < 1e-5


@pytest.mark.usefixtures("poisoned_memory")
def test_trains_in_tf32() -> None:
    chain = Builder(2, transposed(FLAT["k3s2p1op1"])).op("silu").norm(5).op("relu").chain()
    tensors = [t.requires_grad_() for t in tensors_for(chain, (2, 3, 4, 5), torch.float32, "cpu", 0, "normal")]
    plan = planned(chain, tensors, "tf32", needs_grad=True)
    assert plan.gradients.of_input is not None
    training = Training(plan, chain)
    theirs = [t.detach().double().requires_grad_() for t in tensors]
    truth = reference.evaluate(chain, theirs)
    dy = torch.randn(truth.shape)
    ours = torch.autograd.grad(training(tensors), tensors, dy)
    for mine, right in zip(ours, torch.autograd.grad(truth, theirs, dy.double())):
        torch.testing.assert_close(mine.double(), right, rtol=1e-2, atol=1e-2 * float(right.abs().max()))


STEPS = Builder(2, conv(2, (3, 5), padding=1)).op("leaky_relu", slope=0.5).chain()
INFINITE = {
    "stride 1": STEPS,
    "1×1": Builder(2, conv(2, (3, 5), 1)).op("mul", -1.0).chain(),
    "sums": Builder(2, conv(2, (3, 5))).op("relu").reduce("mean", "space").chain(),
    "k3s2p1op1": Builder(2, transposed(FLAT["k3s2p1op1"])).op("leaky_relu", slope=0.5).chain(),
    "strides 3 and 4": Builder(2, transposed(FLAT["strides 3 and 4"])).op("mul", 3.0).chain(),
}


def with_infinities(chain: Chain) -> list[Tensor]:
    """Infinities of both signs and NaN, beside weights and inputs that no half-precision plane can hold."""
    tensors = tensors_for(chain, (2, 3, 7, 6), torch.float32, "cpu", 0, "normal")
    x, weight = tensors[0].clone(), tensors[1].clone()
    x[0, 0, 1, 1], x[0, 1, 4, 4], x[1, 2, 0, 0], x[1, 0, 5, 3] = torch.inf, -torch.inf, torch.inf, torch.nan
    x[:, :, 2, 2] *= 1e-30
    weight[0], weight[-1] = weight[0] * 1e-25, -(weight[-1].abs())
    weight.view(-1)[1::4] *= 1e-25
    return [x, weight, *tensors[2:]]


def same_where_not_finite(ours: Tensor, theirs: Tensor) -> bool:
    plain = [torch.nan_to_num(torch.where(y.isfinite(), 0.0, y), 2.0, 1.0, -1.0) for y in (ours, theirs)]
    return torch.equal(*plain)


# Two planes and one: what keeps infinities is the same for either, and each way to convolve has it once.
@pytest.mark.parametrize(("name", "precision"), [*((name, "fp32") for name in INFINITE), ("stride 1", "tf32")])
def test_infinities_come_out_as_of_pytorch(name: str, precision: str) -> None:
    chain = INFINITE[name]
    tensors = with_infinities(chain)
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    assert {float(y) for y in truth[~truth.isfinite()].abs() if not y.isnan()} == {torch.inf}
    ours = run(chain, tensors, precision)
    assert same_where_not_finite(ours, truth.float())
    is_finite = truth.isfinite()
    most = 1e-5 if precision == "fp32" else 5e-3
    off = (ours.double() - truth)[is_finite].abs().max() if is_finite.any() else torch.zeros(())
    assert float(off) < most * 10


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_an_infinite_weight_comes_out_as_of_pytorch(precision: str) -> None:
    """Without padding: what PyTorch makes of zeros beside the input differs by its algorithm."""
    chain = INFINITE["1×1"]
    tensors = [t.clone() for t in tensors_for(chain, (2, 3, 7, 6), torch.float32, "cpu", 0, "normal")]
    tensors[1][1, 1] = -torch.inf
    tensors[0][0, :, 2, 2] *= 1e-30
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    assert bool((truth[:, 1].abs() == torch.inf).all())
    assert same_where_not_finite(run(chain, tensors, precision), truth.float())


NORMAL = Builder(2, transposed(FLAT["k3s2p1op1"])).op("relu").chain()
ODD = Builder(2, transposed(FLAT["strides 3 and 4"])).op("relu").norm(None).chain()
# module, the right text, the wrong text, a chain that tells them apart
MUTANTS = [
    ("phases", "residue + left * STRIDE", "residue + (taps_of(residue, KERNEL, STRIDE) - 1 - left) * STRIDE", ODD),
    ("phases", "residue = (remainder + CROP) % STRIDE", "residue = remainder % STRIDE", NORMAL),
    ("phases", "(x < OW) & (y < OH)", "(x < OW + 1) & (y < OH)", NORMAL),
    ("phases", "i_tile * PHASES + i_phase", "i_tile * PHASES", ODD),
    ("planes", "part = tl.dot(left_low, right)", "part = tl.dot(left_low * 0, right)", NORMAL),
    ("phases", "tl.load(p_inf) != 0", "tl.load(p_inf) > 1", INFINITE["k3s2p1op1"]),
    ("convolve", "tl.load(p_inf) != 0", "tl.load(p_inf) > 1", STEPS),
    ("planes", 'tl.max(tl.abs(x.to(tl.float32))) == float("inf")', "tl.max(x.to(tl.float32)) == 1.5", STEPS),
    ("planes", "tl.where((tl.abs(scaled) < 5.9604644775390625e-08) & (x != 0.0), tiny, scaled)", "scaled", STEPS),
]


def is_right(chain: Chain, tensors: Sequence[Tensor]) -> bool:
    if bool(tensors[0].isfinite().all()):
        return error(chain, tensors) < 1e-5
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    return same_where_not_finite(run(chain, tensors), truth.float())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}: {m[2][:40]}")
@pytest.mark.usefixtures("poisoned_memory")
def test_a_wrong_kernel_is_seen_to_fail(mutant: tuple[str, str, str, Chain], monkeypatch: pytest.MonkeyPatch) -> None:
    name, right, wrong, chain = mutant
    finite = tensors_for(chain, (2, 3, 4, 5), torch.float32, "cpu", 0, "normal")
    tensors = with_infinities(chain) if chain in INFINITE.values() else finite
    assert is_right(chain, tensors)
    replace_text(monkeypatch, name, right, wrong)
    assert not is_right(chain, tensors)


@pytest.mark.usefixtures("poisoned_memory")
def test_a_dropped_output_padding_is_seen_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the phases of a convolution without it."""
    tensors = tensors_for(NORMAL, (2, 3, 4, 5), torch.float32, "cpu", 0, "normal")
    honest = phases.phases_of
    monkeypatch.setattr(
        "postlude.plan.volume.phases_of",
        lambda how, space: honest(dataclasses.replace(how, output_padding=(0,) * how.dims), space),
    )
    assert not is_right(NORMAL, tensors)
