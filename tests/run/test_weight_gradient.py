"""The weight's gradient as a product over positions, by Triton's interpreter, against float64 autograd."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor

from cases import conv
from fuzz.drawing import plain_convolutions
from machines import SMALL_H200
from postlude import reference
from postlude.chain import Convolution
from postlude.plan.gemm import Arithmetic
from postlude.plan.problem import spec_of
from postlude.plan.weight_gradient import weight_gemm_for
from postlude.stages.pack import Packing, Unpacked
from postlude.stages.weight_gradient import gradient_packing, weight_gradient
from tracing import run_stage

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
CARD = SMALL_H200
EXACT, TWO, ONE = Arithmetic("float64"), Arithmetic("float16", 2, True), Arithmetic("float16", 1, True)
HALF = Arithmetic("float16")
CASES: dict[str, tuple[Convolution, tuple[int, ...]]] = {
    "padded": (conv(3, (6, 5), padding=1), (2, 6, 4, 3, 5)),
    "valid": (conv(3, (3, 8)), (2, 3, 4, 5, 5)),
    "transposed": (conv(3, (4, 6), transposed=True), (2, 4, 3, 4, 3)),
    "transposed and padded": (conv(2, (20, 4), transposed=True, padding=1), (3, 20, 5, 6)),
    "1×1": (conv(2, (5, 7), 1), (2, 5, 6, 4)),
    "2 taps": (conv(2, (5, 18), 2), (2, 5, 6, 4)),
    "4 taps": (conv(2, (5, 18), 4, padding=1), (2, 5, 6, 5)),
    "5 taps, transposed": (conv(2, (4, 6), 5, transposed=True, padding=1), (2, 4, 4, 3)),
    "neighbours": (conv(3, (5, 18), padding=1), (2, 5, 3, 4, 6)),
    "neighbours, transposed": (conv(2, (20, 30), transposed=True, padding=1), (3, 20, 5, 4)),
    "neighbours, 2 taps": (conv(2, (3, 32), 2), (2, 3, 4, 5)),
    "neighbours, 2 taps, an odd shift": (conv(2, (3, 32), 2), (2, 3, 4, 4)),
    "neighbours, 16 channels": (conv(3, (3, 8)), (2, 3, 4, 5, 5)),
    "neighbours, 4 taps": (conv(2, (3, 18), 4, padding=1), (2, 3, 5, 6)),
    "neighbours, 5 taps": (conv(2, (3, 18), 5, padding=2), (2, 3, 4, 5)),
}
EXAMPLES = int(os.environ.get("POSTLUDE_FUZZ", "5"))
NEIGHBOURS = [name for name in CASES if name.startswith("neighbours")]


def both(name: str, arithmetic: Arithmetic, layout: str = "contiguous", turned: bool = False) -> tuple[Tensor, Tensor]:
    return both_of(*CASES[name], arithmetic, layout, turned)


def both_of(
    how: Convolution, shape: tuple[int, ...], arithmetic: Arithmetic, layout: str = "contiguous", turned: bool = False
) -> tuple[Tensor, Tensor]:
    """Ours and the truth."""
    dtype = {"float64": torch.float64}.get(arithmetic.operands, torch.float32 if arithmetic.scaled else torch.float16)
    generator = torch.Generator().manual_seed(0)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    form = last if layout == "channels_last" else torch.contiguous_format
    x = torch.randn(shape, generator=generator).to(dtype).contiguous(memory_format=form)
    channels = (how.in_channels, how.out_channels) if how.transposed else (how.out_channels, how.in_channels)
    weight = torch.randn(*channels, *how.kernel, generator=generator).to(dtype)
    out = (shape[0], how.out_channels, *how.output_space(shape[2:]))
    dy = (torch.randn(out, generator=generator) + 0.5).to(dtype).contiguous(memory_format=form)
    exact = weight.double().requires_grad_()
    (truth,) = torch.autograd.grad(reference.convolve(how, x.double(), exact, None), exact, dy.double())
    gemm = dataclasses.replace(weight_gemm_for(how, shape[2:], arithmetic, CARD), splits=3, turned=turned)

    def stage(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
        return weight_gradient(how, gemm, Unpacked(x), spec_of(x), gradient_packing(gemm, spec_of(dy))(dy), weight)

    (ours,) = run_stage(stage, x, dy, weight)
    assert ours is not None
    return ours, truth


def error(found: tuple[Tensor, Tensor]) -> float:
    ours, truth = found
    assert ours.shape == truth.shape
    return float((ours.double() - truth).abs().max() / truth.abs().max())


# Only packing knows the layout: a few cases say as much of it as all.
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "contiguous") for name in CASES),
        *((name, "channels_last") for name in ("padded", "neighbours, 2 taps")),
    ],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_is_autograds(name: str, layout: str) -> None:
    assert error(both(name, EXACT, layout)) < 1e-13


@pytest.mark.parametrize(("arithmetic", "most"), [(TWO, 1e-6), (ONE, 2e-3), (HALF, 2e-3)], ids=str)
@pytest.mark.parametrize("name", ["padded", "transposed", "neighbours, 2 taps", "neighbours, 16 channels"])
@pytest.mark.usefixtures("poisoned_memory")
def test_in_every_arithmetic(name: str, arithmetic: Arithmetic, most: float) -> None:
    assert error(both(name, arithmetic)) < most


@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES < 20, phases=[Phase.generate])
@given(plain_convolutions((1, 3, 20), (5, 16, 30, 40), 4))
def test_of_any_convolution(drawn: tuple[Convolution, tuple[int, ...]]) -> None:
    """Rows of one, two and four positions, whatever the sizes and borders do to where they begin."""
    how, space = drawn
    assert error(both_of(how, (2, how.in_channels, *space), ONE)) < 4e-3


@pytest.mark.parametrize("arithmetic", [EXACT, TWO], ids=str)
@pytest.mark.parametrize("name", ["transposed", "neighbours"])
@pytest.mark.usefixtures("poisoned_memory")
def test_turned_round(name: str, arithmetic: Arithmetic) -> None:
    assert error(both(name, arithmetic, turned=True)) < (1e-13 if arithmetic.is_exact else 1e-6)


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_few_output_channels_make_neighbours_a_row(name: str) -> None:
    how, shape = CASES[name]
    assert weight_gemm_for(how, shape[2:], ONE, CARD).neighbours == (4 if "16" in name else 2)


@pytest.mark.parametrize("name", ["neighbours, 2 taps, an odd shift", "neighbours, 16 channels"])
def test_the_row_before_the_first_matters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.plan.gemm.WeightGemm.front", 0)
    assert error(both(name, ONE)) > 1e-2


def test_without_the_shift_it_is_seen_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.plan.gemm.WeightGemm.shift", 0)
    assert error(both("padded", EXACT)) > 1e-2


def test_taps_of_the_wrong_place_in_a_row_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.plan.gemm.WeightGemm.groups_of_a_row", 1)
    assert error(both("4 taps", EXACT)) > 1e-2


def test_what_is_packed_holds_nothing_of_the_original() -> None:
    how, shape = CASES["padded"]
    gemm = weight_gemm_for(how, shape[2:], EXACT, CARD)
    x = torch.randn(shape, dtype=torch.float64)
    packed = run_stage(Packing(spec_of(x), gemm.volume, EXACT, gemm.channels), x)
    assert all(part is None or part.data_ptr() != x.data_ptr() for part in packed)
    assert packed[0] is not None
