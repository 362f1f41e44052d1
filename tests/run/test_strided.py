"""Our strided convolution by residue, by Triton's interpreter: forward and both gradients, against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder
from postlude import reference
from postlude.chain import Chain, Convolution
from postlude.check import tensors_for
from postlude.plan import Plan
from postlude.plan.gemm import Gemm
from postlude.plan.problem import Layout
from postlude.run.chain_run import Training
from run.test_phases import DEEP, FLAT, same_where_not_finite, with_infinities
from run.test_phases import planned as in_small_tiles
from tracing import run_plan
from wrong_kernels import replace_text

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
# Kernels, strides and paddings; one wider than its stride on either side of a phase, one of a single tap.
SIZES = {name: sizes[:3] for name, sizes in FLAT.items() if "op1" not in name}
SIZES["k1s2"] = ((1, 1), (2, 2), (0, 0))
DEEP_SIZES = {name: sizes[:3] for name, sizes in DEEP.items()}
SHAPES = {2: (2, 3, 9, 10), 3: (2, 3, 5, 4, 7)}  # odd and even: some inputs lie behind the last output


def strided(name: str, outputs: int = 5, bias: bool = True) -> Convolution:
    kernel, stride, padding = {**SIZES, **DEEP_SIZES}[name]
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    return Convolution(False, 3, outputs, kernel, stride, padding, ones, zeros, has_bias=bias)


def chains(name: str) -> tuple[Chain, Chain]:
    """With a norm and without, one of them without a bias."""
    dims, biased = len(strided(name).kernel), len(name) % 2 == 0
    with_norm = Builder(dims, strided(name, bias=biased)).op("relu").norm(None).op("mul", 2.0).chain()
    return with_norm, Builder(dims, strided(name, bias=not biased)).op("tanh").op("add", "full").chain()


def given_for(chain: Chain, dtype: torch.dtype = torch.float32, layout: Layout = "contiguous") -> list[Tensor]:
    return list(tensors_for(chain, SHAPES[chain.dims], dtype, "cpu", 0, "normal", layout))


def planned(chain: Chain, tensors: Sequence[Tensor], precision: str = "fp32", needs_grad: bool = False) -> Plan:
    plan = in_small_tiles(chain, tensors, precision, needs_grad)
    assert isinstance(plan.own, Gemm)
    assert plan.own.volume.has_residues
    return plan


def run(chain: Chain, tensors: Sequence[Tensor], precision: str = "fp32") -> Tensor:
    with torch.no_grad():
        return run_plan(planned(chain, tensors, precision), tensors)


def off(ours: Tensor, truth: Tensor) -> float:
    assert ours.shape == truth.shape
    return float(torch.nan_to_num((ours.double() - truth).abs().max() / truth.abs().max(), nan=torch.inf))


def error(chain: Chain, tensors: Sequence[Tensor], precision: str = "fp32") -> float:
    return off(run(chain, tensors, precision), reference.evaluate(chain, tensors, dtype=torch.float64))


@pytest.mark.parametrize("name", [*SIZES, *DEEP_SIZES])
@pytest.mark.usefixtures("poisoned_memory")
def test_is_right_for_every_kernel_stride_and_padding(name: str) -> None:
    with_norm, without = chains(name)
    assert error(without, given_for(without)) < 1e-5
    assert error(with_norm, given_for(with_norm, layout="channels_last")) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "precision", "most"),
    [(torch.float32, "tf32", 5e-3), (torch.float16, "auto", 1e-2), (torch.float64, "auto", 1e-10)],
    ids=str,
)
@pytest.mark.usefixtures("poisoned_memory")
def test_is_right_in_every_arithmetic(dtype: torch.dtype, precision: str, most: float) -> None:
    for chain, layout in zip(chains("k3s2p1"), ("contiguous", "channels_last")):
        assert error(chain, given_for(chain, dtype, layout), precision) < most  # type: ignore[arg-type]


def test_only_moments_are_kept_where_no_more_is_needed() -> None:
    chain = Builder(2, strided("k3s2p1", outputs=70)).norm(7).reduce("sum", "space").op("relu").chain()
    tensors = given_for(chain)
    assert len(planned(chain, tensors).passes) == 1
    assert error(chain, tensors) < 1e-5


PLAIN = Builder(2, strided("k3s2p1")).op("leaky_relu", slope=0.5).chain()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_infinities_come_out_as_of_pytorch(precision: str) -> None:
    """A tap of another residue does not see them."""
    tensors = with_infinities(PLAIN)
    truth = reference.evaluate(PLAIN, tensors, dtype=torch.float64)
    assert bool((truth.abs() == torch.inf).any())
    ours, is_finite = run(PLAIN, tensors, precision), truth.isfinite()
    assert same_where_not_finite(ours, truth.float())
    assert float((ours.double() - truth)[is_finite].abs().max()) < (1e-4 if precision == "fp32" else 5e-2)


def gradient_errors(
    chain: Chain, slots: Sequence[int] = (0, 1), precision: str = "fp32", **given: object
) -> list[float]:
    """Of the gradients of these slots in a training step, relative to the largest number in each."""
    tensors = given_for(chain, **given)  # type: ignore[arg-type]
    plan = planned(chain, tensors, precision, needs_grad=True)
    assert plan.gradients.of_input is not None
    assert plan.gradients.of_weight is not None
    summed = dataclasses.replace(plan.gradients.of_weight, splits=3, block_k=16)
    plan = dataclasses.replace(plan, gradients=dataclasses.replace(plan.gradients, of_weight=summed))
    ours, theirs = [t.clone() for t in tensors], [t.double() for t in tensors]
    leaves = [[some[slot].requires_grad_() for slot in slots] for some in (ours, theirs)]
    truth = reference.evaluate(chain, theirs)
    dy = torch.randn(truth.shape, generator=torch.Generator().manual_seed(2)) + 0.5
    found = torch.autograd.grad(Training(plan, chain)(ours), leaves[0], dy.to(ours[0].dtype))
    return [off(mine, right) for mine, right in zip(found, torch.autograd.grad(truth, leaves[1], dy.double()))]


@pytest.mark.parametrize("name", [*(name for name in SIZES if name != "strides 3 and 4"), *DEEP_SIZES])
@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_are_autograds(name: str) -> None:
    """Of inputs behind the last output too: they are zero. (A kernel of six taps has PyTorch's gradients.)"""
    with_norm, without = chains(name)
    assert max(gradient_errors(without, (0, 1, 2))) < 1e-5
    assert max(gradient_errors(with_norm, layout="channels_last")) < 1e-4


@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_in_tf32() -> None:
    assert max(gradient_errors(chains("k3s2p1")[0], (0, 1, 2), "tf32")) < 5e-3


@pytest.mark.parametrize("slots", [(0,), (1,)], ids=["the input's alone", "the weight's alone"])
@pytest.mark.usefixtures("poisoned_memory")
def test_a_gradient_alone(slots: tuple[int, ...]) -> None:
    assert max(gradient_errors(chains("k3s2p1")[0], slots)) < 1e-4


@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_of_a_convolution_alone() -> None:
    """No pass before them finds the gradient's scales."""
    assert max(gradient_errors(Builder(2, strided("k4s2p1", bias=False)).chain())) < 1e-5


@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_before_a_layer_norm_are_ours() -> None:
    chain = Builder(2, strided("k3s2p1")).layer_norm().op("silu").chain()
    assert max(gradient_errors(chain, dtype=torch.float64)) < 1e-10


WITH_NORM, DEEP_NORM = (Builder(d, strided(n)).norm(None).chain() for d, n in ((2, "k3s2p1"), (3, "3-D k3s2p1op1")))
# module, the right text, the wrong text, a chain that tells them apart: its result, or its gradients
MUTANTS = [
    ("residues", "column = i // (KD * KH * KW) * BLOCK_K", "column = BLOCK_K", WITH_NORM, "result"),
    ("residues", "z * SLICE_PITCH + y * ROW_PITCH + x\n", "y * ROW_PITCH + x\n", DEEP_NORM, "result"),
    ("residues", "tl.where(o_pad < PW, o_pad, o_pad + W)", "o_pad + W", WITH_NORM, "result"),
    ("convolve", "tl.load(p_inf) != 0", "tl.load(p_inf) > 1", PLAIN, "infinities"),
    ("residues", "cell = z // STRIDE_D", "cell = 0 * z // STRIDE_D", DEEP_NORM, "gradients"),
    ("phases", "residue = (remainder + CROP) % STRIDE", "residue = remainder % STRIDE", WITH_NORM, "gradients"),
]


def is_right(chain: Chain, of: str) -> bool:
    if of == "gradients":
        return max(gradient_errors(chain)) < 1e-4
    if of == "result":
        return error(chain, given_for(chain)) < 1e-5
    tensors = with_infinities(chain)
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    return same_where_not_finite(run(chain, tensors), truth.float())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}: {m[2][:40]}")
@pytest.mark.usefixtures("poisoned_memory")
def test_a_wrong_kernel_is_seen_to_fail(
    mutant: tuple[str, str, str, Chain, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, right, wrong, chain, of = mutant
    assert is_right(chain, of)
    replace_text(monkeypatch, name, right, wrong)
    assert not is_right(chain, of)
