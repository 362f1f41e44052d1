"""Both gradients of a convolution from one packed gradient, the input's read in place, by Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from gpu_plans import planned_for_a_gpu
from postlude import reference
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.graph import backend
from postlude.plan import Plan, problem_of
from postlude.plan.boxes import Boxes
from postlude.plan.convolve import packs_gradient
from postlude.plan.gemm import Arithmetic, input_gradient_of
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.plan import Gradients
from postlude.plan.volume import volume_for
from postlude.plan.weight_gradient import weight_gemm_for
from postlude.run.chain_run import Training
from postlude.stages import convolve_boxes
from run.test_gpu import CARD
from run.test_training import gradients

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
FLAT = Builder(2, conv(2, (18, 20), transposed=True)).op("relu").norm(2).chain()
DEEP = Builder(3, conv(3, (16, 20), transposed=True)).op("silu").norm(None).chain()
CASES = {"2-D": (FLAT, (2, 18, 3, 8)), "3-D": (DEEP, (2, 16, 2, 3, 6))}


def in_place(chain: Chain, tensors: Sequence[Tensor], packs: bool) -> Training:
    """With small boxes, so that there are several of them; `packs`: the pass before writes what both products read."""
    problem = dataclasses.replace(problem_of(tensors), needs_grad=True)
    plan = lower_for_gpu(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    producer, space = chain.producer, tensors[0].shape[2:]
    assert producer is not None
    arithmetic = Arithmetic(problem.x.dtype)
    volume = volume_for(input_gradient_of(producer, space), producer.output_space(space), 2)
    boxes = Boxes(arithmetic, volume, 32, True, 2, 4, 16, 16, 2, 4)
    weight = dataclasses.replace(weight_gemm_for(producer, space, arithmetic, CARD), splits=2)
    assert packs_gradient(boxes, weight)
    changed = dataclasses.replace(plan, gradients=Gradients(boxes, weight, are_packed=packs))
    return Training(changed, chain)


def error(name: str, layout: str, packs: bool, dtype: torch.dtype = torch.float64) -> float:
    """The largest of all gradients, of the largest number in each."""
    chain, shape = CASES[name]
    tensors = [t.requires_grad_() for t in tensors_for(chain, shape, dtype, layout=layout)]  # type: ignore[arg-type]
    y = reference.evaluate(chain, tensors, dtype=torch.float64)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    truth = torch.autograd.grad(y, tensors, dy)
    ours = torch.autograd.grad(in_place(chain, tensors, packs)(tensors), tensors, dy.to(dtype))
    # The norm cancels the bias, whose gradient is nothing but rounding in either.
    pairs = [pair for pair, role in zip(zip(ours, truth), chain.roles) if role != "bias"]
    return max(float((a.double() - b.double()).abs().max() / (b.abs().max() + 1)) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "layout", "packs"),
    [
        *(("2-D", "contiguous", True), ("2-D", "channels_last", False)),
        *(("3-D", "contiguous", False), ("3-D", "channels_last", True)),
    ],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_are_autograds(name: str, layout: str, packs: bool) -> None:
    assert error(name, layout, packs) < 1e-8


@pytest.mark.usefixtures("poisoned_memory")
def test_in_half_precision() -> None:
    assert error("2-D", "contiguous", packs=True, dtype=torch.float16) < 5e-3


def test_taps_the_wrong_way_round_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = convolve_boxes.pack_weight

    def turned(*given: Any) -> tuple[Tensor, Tensor]:
        *tile, sizes, largest, flip = given
        return pack(*tile, sizes[::-1], largest, not flip)

    monkeypatch.setattr(convolve_boxes, "pack_weight", turned)
    assert error("2-D", "contiguous", packs=True) > 1e-2


ALONE = {
    "plain": conv(3, (4, 8), padding=1),
    "without a bias": conv(2, (4, 8), bias=False),
    "upwards": conv(2, (4, 8), transposed=True, stride=2, padding=1, output_padding=1),
}


@pytest.mark.parametrize(
    ("name", "layout"), [("plain", "contiguous"), ("without a bias", "contiguous"), ("upwards", "channels_last")]
)
def test_a_convolution_alone_is_trained(name: str, layout: str) -> None:
    chain = Builder(ALONE[name].dims, ALONE[name]).chain()
    shape = (2, 4, *[9] * chain.dims)
    tensors = [t.requires_grad_() for t in tensors_for(chain, shape, torch.float32, layout=layout)]  # type: ignore[arg-type]
    problem = dataclasses.replace(problem_of(tensors, "fp32"), device="cuda", needs_grad=True)
    plan = lower_for_gpu(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.gradients.of_input is not None
    assert plan.gradients.of_weight is not None
    truth = gradients(lambda given: reference.evaluate(chain, given, dtype=torch.float64), tensors)
    for ours, true in zip(gradients(Training(plan, chain), tensors), truth, strict=True):
        assert ours.shape == true.shape
        torch.testing.assert_close(ours.double(), true.double(), rtol=2e-6, atol=2e-6 * float(true.abs().max()))


class Least(torch.nn.Module):
    """A convolution before a step that no chain has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv3d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.min(self.conv(x), dim=2)[0], dim=1)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_convolution_alone_is_a_chain_in_strict_fp32(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_device_of", lambda _: "cuda")
    monkeypatch.setattr(backend, "check_precision", lambda *_: None)
    plain, x = Least(), torch.randn(2, 3, 5, 6, 7)
    model, made = Least(), backend.Backend(precision=precision, rest="eager")
    model.load_state_dict(plain.state_dict())
    with planned_for_a_gpu():
        y = torch.compile(model, backend=made)(x)
    torch.testing.assert_close(y, plain(x), rtol=1e-4, atol=1e-5)
    assert [str(site.chain) for one in made.captured for site in one.sites] == (
        ["conv3d(3→8, k3)"] if precision == "fp32" else []
    )
