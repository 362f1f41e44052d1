"""The convolution that reads its input in place, by Triton's interpreter: borders, neighbours, moments."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.plan import Plan, problem_of
from postlude.plan.boxes import Boxes
from postlude.plan.gemm import Arithmetic
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.volume import volume_for
from postlude.run.launch import DescriptorLike
from run.test_gpu import CARD
from tracing import run_plan
from wrong_kernels import replace_text

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
SAME = Builder(3, conv(3, (16, 24), padding=1)).norm(4).op("relu").chain()
PLAIN = Builder(3, conv(3, (20, 16), padding=0)).op("gelu", approximate="none").op("add", "full").chain()
TURNED = Builder(3, conv(3, (16, 16), transposed=True, bias=False)).op("relu").norm(8).chain()
FLAT = Builder(2, conv(2, (32, 40), 5, padding=2)).norm(None).op("silu").chain()
MEAN = Builder(3, conv(3, (16, 16), padding=1)).op("relu").norm(4).reduce("mean", "space").chain()
UNEVEN = Builder(3, dataclasses.replace(conv(3, (16, 16)), kernel=(1, 3, 5), padding=(0, 1, 2))).norm(4).chain()
# name → chain, input, neighbouring outputs of a row
CASES: dict[str, tuple[Chain, tuple[int, ...], int]] = {
    "same": (SAME, (2, 16, 3, 5, 12), 2),
    "same, one output a row": (SAME, (2, 16, 3, 9, 7), 1),
    "no padding": (PLAIN, (2, 20, 4, 6, 8), 1),
    "transposed": (TURNED, (2, 16, 2, 3, 8), 4),
    "flat": (FLAT, (2, 32, 11, 10), 2),
    "moments only": (MEAN, (2, 16, 3, 4, 8), 2),
    "uneven taps": (UNEVEN, (1, 16, 2, 5, 12), 4),
}


def boxed(chain: Chain, tensors: list[Tensor], width: int) -> Tensor:
    """With small boxes, so that there are several of them."""
    problem = problem_of(tensors)
    plan = lower_for_gpu(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    conv = chain.producer
    assert conv is not None
    channels = -(-conv.in_channels // 16) * 16
    packs = problem.x.layout != "channels_last" or channels != conv.in_channels
    volume = volume_for(conv, problem.x.shape[2:], width)
    own = Boxes(Arithmetic(problem.x.dtype), volume, channels, packs, 4, 4, 16, 16, 2, 4)
    return run_plan(dataclasses.replace(plan, own=own), tensors)


def error(name: str, layout: str, dtype: torch.dtype) -> float:
    chain, shape, width = CASES[name]
    tensors = [*tensors_for(chain, shape, dtype, "cpu", 0, "normal", layout)]
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    with torch.no_grad():
        ours = boxed(chain, tensors, width)
    assert ours.shape == truth.shape
    return float(torch.nan_to_num((ours.double() - truth).abs().max() / truth.std(), nan=torch.inf))


# What is contiguous is packed first, and then the same.
@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "channels_last") for name in CASES), *((name, "contiguous") for name in ("same", "no padding"))],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_agrees_with_float64(name: str, layout: str) -> None:
    assert error(name, layout, torch.float64) < 1e-12


@pytest.mark.usefixtures("poisoned_memory")
def test_agrees_with_float64_in_16_bits() -> None:
    assert error("same", "channels_last", torch.float16) < 2e-2


MUTANTS = [
    # where it is, the right text, the wrong one, a case that tells them apart
    ("convolve_boxes", "(x + PW * NEIGHBOURS) // NEIGHBOURS - PW", "x // NEIGHBOURS", "same"),
    ("convolve_boxes", "% KH - PH", "% KH", "flat"),
    ("convolve_boxes", "D + PD - z0)", "D - z0)", "transposed"),
    ("epilogue", "quotient(b_sum, tl.maximum(count, 1.0))", "b_sum / (count + 1.0)", "same"),
    ("convolve_boxes", "(2, 0, 1))", "(2, 1, 0))", "uneven taps"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m[2])
@pytest.mark.usefixtures("poisoned_memory")
def test_a_wrong_kernel_is_seen_to_fail(mutant: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    file, right, wrong, name = mutant
    replace_text(monkeypatch, file, right, wrong)
    assert error(name, "channels_last", torch.float64) > 1e-6


def test_memory_where_no_descriptor_may_begin_is_copied() -> None:
    chain, shape, width = CASES["same"]
    tensors = [*tensors_for(chain, shape, torch.float64, "cpu", 0, "normal", "channels_last")]
    expected = boxed(chain, tensors, width)
    x = tensors[0].permute(0, 2, 3, 4, 1)
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert moved.data_ptr() % 16
    tensors[0] = moved.permute(0, 4, 1, 2, 3)
    assert torch.equal(boxed(chain, tensors, width), expected)


def test_a_descriptor_does_not_keep_the_memory_of_the_first_call() -> None:
    """Neither for later calls, which have memory of their own, nor at all."""
    made = DescriptorLike((4, 16), (16, 1), (4, 16))
    for _ in range(2):
        base = torch.empty(4, 16)
        alive, described = weakref.ref(base), made(base)
        assert described.base is base
        del base, described
        assert alive() is None
