"""The gradients of strided transposed convolutions by residue, by Triton's interpreter, against float64 autograd."""

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
from postlude.plan import Plan, problem_of
from postlude.plan.convolve import product_for
from postlude.plan.gemm import Arithmetic, input_gradient_of
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.problem import CHANNELS_LAST
from postlude.plan.weight_gradient import weight_gemm_for
from postlude.run.chain_run import Training
from postlude.stages.convolution_gradients import convolution_gradients
from postlude.stages.pack import Unpacked
from run.test_gpu import CARD
from run.test_phases import DEEP, FLAT, same_where_not_finite
from tracing import run_stage
from wrong_kernels import replace_text

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
EXACT, TWO, ONE = Arithmetic("float64"), Arithmetic("float16", 2, True), Arithmetic("float16", 1, True)
HALF = Arithmetic("float16")


NAMES = ("k3s2p1op1", "k3s2p1", "k4s2p1", "k2s2op1", "k5s2p2", "strides 1 and 3", "strides 4 and 1", "k2s2p1")
SHAPES = {2: (2, 5, 3, 4), 3: (2, 5, 3, 2, 3)}
# Two blocks of the gradient's channels, and channels that are multiples of nothing.
CASES = {
    name: Convolution(True, 5, 18, kernel, stride, padding, (1,) * len(kernel), more)
    for name, (kernel, stride, padding, more) in {**FLAT, **DEEP}.items()
}

BIASED = dataclasses.replace(CASES["k3s2p1op1"], has_bias=True)


def plan_of(how: Convolution, tensors: Sequence[Tensor], arithmetic: Arithmetic) -> Plan:
    """A plan with these gradients, in small tiles, so that there are several, and summed in three parts."""
    chain = Builder(how.dims, how).op("relu").chain()
    problem = dataclasses.replace(problem_of(tensors), needs_grad=True)
    plan = lower_for_gpu(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    space = tensors[0].shape[2:]
    given = (input_gradient_of(how, space), how.output_space(space), arithmetic, CARD)
    product = dataclasses.replace(product_for(*given, widens=False), rows=32, block_k=16)
    summed = dataclasses.replace(weight_gemm_for(*given), splits=3, block_k=16)
    assert product.volume == summed.volume
    return dataclasses.replace(plan, gradients=dataclasses.replace(plan.gradients, of_input=product, of_weight=summed))


def found(
    how: Convolution, arithmetic: Arithmetic, layout: str = "contiguous", dy: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Ours and the truth: the gradients of input and weight."""
    dtype = {"float64": torch.float64}.get(arithmetic.operands, torch.float32 if arithmetic.scaled else torch.float16)
    tensors = tensors_for(Builder(how.dims, how).chain(), SHAPES[how.dims], dtype, layout=layout)  # type: ignore[arg-type]
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    y = reference.convolve(how, *exact, None)
    if dy is None:
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) + 0.5
    dy = dy.to(dtype)
    if layout == "channels_last":
        dy = dy.contiguous(memory_format=CHANNELS_LAST[how.dims])
    truth = torch.autograd.grad(y, exact, dy.double())
    plan = plan_of(how, tensors, arithmetic)

    def stage(dy: Tensor, x: Tensor, weight: Tensor) -> list[Tensor | None]:
        return convolution_gradients(plan, Unpacked(dy), None, Unpacked(x), weight, (True, True))

    ours = run_stage(stage, dy, *tensors)
    return [tensor for tensor in ours if tensor is not None], list(truth)


def errors(ours: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Of the input's gradient and of the weight's, relative to the largest number in each."""
    assert [tensor.shape for tensor in ours] == [tensor.shape for tensor in truth]
    off = [(a.double() - b).abs().max() / b.abs().max() for a, b in zip(ours, truth)]
    return [float(torch.nan_to_num(one, nan=torch.inf)) for one in off]


@pytest.mark.parametrize("name", [*NAMES, *DEEP])
@pytest.mark.usefixtures("poisoned_memory")
def test_are_autograds(name: str) -> None:
    layout = "channels_last" if len(name) % 2 else "contiguous"
    assert max(errors(*found(CASES[name], EXACT, layout))) < 1e-12


@pytest.mark.parametrize(("arithmetic", "most"), [(TWO, 1e-6), (ONE, 2e-3), (HALF, 2e-3)], ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_in_every_arithmetic(arithmetic: Arithmetic, most: float) -> None:
    assert max(errors(*found(CASES["k3s2p1"], arithmetic))) < most


@pytest.mark.usefixtures("poisoned_memory")
def test_infinities_in_the_input_s_gradient_are_autograds() -> None:
    """The taps of other residues do not see them."""
    how = CASES["k3s2p1"]
    dy = torch.randn(2, 18, 5, 7, generator=torch.Generator().manual_seed(1))
    dy[0, 3, 2, 2], dy[1, 0, 0, 6], dy[1, 17, 3, 3] = torch.inf, -torch.inf, torch.nan
    ours, truth = found(how, dataclasses.replace(TWO, keeps_infinities=True), dy=dy)
    assert same_where_not_finite(ours[0], truth[0].float())
    is_finite = truth[0].isfinite()
    assert float((ours[0].double() - truth[0])[is_finite].abs().max()) < 1e-4


ROWS = Builder(2, dataclasses.replace(BIASED, out_channels=4)).layer_norm().op("silu").chain()
NORM, PLAIN = Builder(2, BIASED).op("silu").norm(3).chain(), Builder(2, BIASED).op("tanh").op("add", "full").chain()


@pytest.mark.parametrize(
    ("chain", "layout", "slots"),
    [(NORM, "channels_last", (0, 1, 2)), (PLAIN, "contiguous", (0,)), (PLAIN, "contiguous", (1, 2))],
    ids=["with a norm", "the input's alone", "the weight's alone"],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_a_chain_trains_with_them(chain: Chain, layout: str, slots: tuple[int, ...]) -> None:
    tensors = tensors_for(chain, (2, 5, 3, 4), torch.float32, "cpu", 0, "normal", layout)  # type: ignore[arg-type]
    problem = dataclasses.replace(problem_of(tensors, "fp32"), needs_grad=True)
    plan = lower_for_gpu(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.gradients.largest_found is not None  # the pass before finds the scales
    ours, theirs = [t.clone() for t in tensors], [t.double() for t in tensors]
    leaves = [[some[slot].requires_grad_() for slot in slots] for some in (ours, theirs)]
    truth = reference.evaluate(chain, theirs)
    dy = torch.randn(truth.shape, generator=torch.Generator().manual_seed(2))
    right = torch.autograd.grad(truth, leaves[1], dy.double())
    for mine, true in zip(torch.autograd.grad(Training(plan, chain)(ours), leaves[0], dy), right):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-4 * float(true.abs().max()))


@pytest.mark.usefixtures("poisoned_memory")
def test_nan_of_one_row_stays_where_autograd_has_it() -> None:
    """A layer_norm makes one row of the convolution's result NaN. No sum of the product reads another row for it."""
    tensors = tensors_for(ROWS, (2, 5, 4, 4), torch.float32, "cpu", 0, "normal")
    tensors[0][0, 2, 1, 2] = torch.inf
    problem = dataclasses.replace(problem_of(tensors, "fp32"), needs_grad=True)
    plan = lower_for_gpu(ROWS, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.gradients.of_input is not None
    ours, theirs = tensors[0].clone().requires_grad_(), tensors[0].double().requires_grad_()
    truth = reference.evaluate(ROWS, [theirs, *(t.double() for t in tensors[1:])])
    (right,) = torch.autograd.grad(truth, theirs, torch.ones_like(truth))
    y = Training(plan, ROWS)([ours, *tensors[1:]])
    (mine,) = torch.autograd.grad(y, ours, torch.ones_like(y))
    assert 0 < int(right.isnan().sum()) < right.numel()
    assert torch.equal(mine.isnan(), right.isnan())
    is_right = right.isfinite()
    torch.testing.assert_close(mine[is_right].double(), right[is_right], rtol=1e-4, atol=1e-5)


# module, the right text, the wrong text, and which gradients are then wrong: the input's, the weight's
MUTANTS = [
    ("residues", "x % STRIDE_W\n    cell", "0\n    cell", (False, True)),
    ("residues", "+ x // STRIDE_W", "+ (x + 1) // STRIDE_W", (False, True)),
    ("residues", "y * ROW_PITCH + x\n", "y * ROW_PITCH + x + 1\n", (True, False)),
    ("residues", "% SLICE_ROWS * STRIDE_H + residue_zy % RESIDUES_H", "% SLICE_ROWS * STRIDE_H", (True, True)),
    ("residues", "tl.where(o_pad < PW, o_pad, o_pad + W)", "o_pad + W", (True, True)),
    ("residues", "column = i // (KD * KH * KW) * BLOCK_K", "column = 0", (True, False)),
    ("residues", "LONGER + (i - FIRST) // TAPS", "LONGER - 1 + (i - FIRST) // TAPS", (True, False)),
    ("residues", "cell = tl.where(is_longer, i %", "cell = tl.where(is_longer, 0 * i %", (True, False)),
    ("weight_gradient", "z, y, x0 + 1, ROW_PITCH", "z, y, x0, ROW_PITCH", (False, True)),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant[0]}: {mutant[2]}")
@pytest.mark.usefixtures("poisoned_memory")
def test_a_wrong_kernel_is_seen_to_fail(
    mutant: tuple[str, str, str, tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, right, wrong, are_wrong = mutant
    replace_text(monkeypatch, name, right, wrong)
    off = errors(*found(CASES["k3s2p1op1"], EXACT))
    assert tuple(one > 1e-2 for one in off) == are_wrong


@pytest.mark.usefixtures("poisoned_memory")
def test_without_zeros_after_a_residue_s_last_sample_it_is_seen_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.plan.volume.Volume.tail_rows", 0)
    assert errors(*found(CASES["k3s2p1"], EXACT))[0] > 1e-2
