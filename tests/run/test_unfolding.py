"""Convolutions of few channels, taps side by side in a packed position, by Triton's interpreter: against float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from postlude import reference
from postlude.chain import Chain, Convolution
from postlude.check import tensors_for
from postlude.plan import Plan
from postlude.plan.gemm import Gemm
from postlude.run.chain_run import Training
from run.test_phases import error, planned, same_where_not_finite
from tracing import run_plan
from wrong_kernels import replace_text

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("poisoned_memory")]


def uneven(channels: int, kernel: tuple[int, ...], padding: tuple[int, ...], transposed: bool = False) -> Convolution:
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    return Convolution(transposed, channels, 5, kernel, ones, padding, ones, zeros)


# name → convolution, input, taps that lie side by side
CASES: dict[str, tuple[Convolution, tuple[int, ...], tuple[int, int]]] = {
    "1 channel, width 62": (conv(2, (1, 5), padding=1), (1, 1, 3, 62), (3, 3)),
    "1 channel, width 130": (conv(2, (1, 16)), (1, 1, 4, 132), (3, 3)),  # more than one block of positions
    "3 channels": (conv(2, (3, 5)), (2, 3, 5, 6), (3, 3)),
    "3 channels, width 1": (conv(2, (3, 16), padding=1, bias=False), (2, 3, 4, 1), (3, 3)),
    "8 channels, width 126": (conv(2, (8, 5)), (1, 8, 4, 128), (1, 3)),
    "8 channels": (conv(2, (8, 16), padding=1), (2, 8, 4, 6), (1, 3)),
    "10 channels": (conv(2, (10, 5), padding=1), (1, 10, 4, 5), (1, 3)),
    "k4 along x": (uneven(8, (2, 4), (1, 1)), (2, 8, 4, 7), (1, 4)),
    "k1 along x": (uneven(8, (3, 1), (1, 0)), (2, 8, 4, 7), (3, 1)),
    "transposed": (conv(2, (3, 5), transposed=True, padding=1), (2, 3, 4, 5), (3, 3)),
    "transposed, 8 channels": (uneven(8, (3, 2), (0, 1), True), (1, 8, 4, 5), (1, 2)),
    "3-D, 3 channels": (conv(3, (3, 5), padding=1), (2, 3, 3, 4, 5), (3, 3)),
    "3-D, 8 channels": (conv(3, (8, 5)), (2, 8, 4, 5, 4), (1, 3)),
    "3-D, k1 in depth": (uneven(3, (1, 3, 3), (0, 0, 1)), (1, 3, 3, 4, 5), (3, 3)),
    "3-D, transposed": (conv(3, (1, 5), transposed=True), (1, 1, 2, 3, 4), (3, 3)),
}
FP32, TF32 = (torch.float32, "fp32", 1e-5), (torch.float32, "tf32", 5e-3)
HALF, EXACT = (torch.float16, "auto", 1e-2), (torch.float64, "auto", 1e-10)


def with_norm(how: Convolution) -> Chain:
    return Builder(how.dims, how).op("relu").norm(None).op("mul", 2.0).chain()


def without(how: Convolution) -> Chain:
    return Builder(how.dims, how).op("tanh").op("add", "full").chain()


def drawn(chain: Chain, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, ...]:
    return tensors_for(chain, shape, dtype, "cpu", 0, "normal", layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_is_right_for_every_kernel_and_padding(name: str) -> None:
    how, shape, taps = CASES[name]
    rows = [(with_norm(how), "contiguous", FP32), (without(how), "channels_last", FP32)]
    if name in ("3 channels", "8 channels", "3-D, 3 channels"):
        rows += [(without(how), "contiguous", mode) for mode in (TF32, HALF, EXACT)]
        rows += [(with_norm(how), "channels_last", mode) for mode in (TF32, HALF)]
    for chain, layout, (dtype, precision, most) in rows:
        tensors = drawn(chain, shape, dtype, layout)
        own = planned(chain, tensors, precision).own
        assert isinstance(own, Gemm)
        assert own.unfolded == taps
        assert error(chain, tensors, precision) < most, (layout, dtype, precision)


def test_several_blocks_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.plan.convolve._COLUMNS", 16)
    how = conv(2, (3, 20), padding=1)
    for chain in (with_norm(how), without(how)):
        assert error(chain, drawn(chain, (1, 3, 3, 4), torch.float32)) < 1e-5


def test_only_moments_are_kept_where_no_more_is_needed() -> None:
    how, shape, _ = CASES["8 channels"]
    for chain in (
        Builder(2, how).op("relu").reduce("mean", "space").chain(),
        Builder(2, how).norm(4).reduce("sum", "space").op("relu").chain(),
    ):
        tensors = drawn(chain, shape, torch.float32)
        assert len(planned(chain, tensors).passes) == 1
        assert error(chain, tensors) < 1e-5


@pytest.mark.parametrize("name", ["8 channels", "transposed"])
def test_gradients_are_autograds(name: str) -> None:
    how, shape, _ = CASES[name]
    chain = Builder(how.dims, how).op("silu").norm(None).op("relu").chain()
    tensors = [t.requires_grad_() for t in drawn(chain, shape, torch.float32)]
    plan = planned(chain, tensors, needs_grad=True)
    assert isinstance(plan.own, Gemm)
    assert plan.own.unfolds
    assert plan.gradients.of_weight is not None
    theirs = [t.detach().double().requires_grad_() for t in tensors]
    truth = reference.evaluate(chain, theirs)
    dy = torch.randn(truth.shape)
    ours = torch.autograd.grad(Training(plan, plan.chain)(tensors), tensors, dy)
    for mine, right in zip(ours, torch.autograd.grad(truth, theirs, dy.double())):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


def infinite(name: str) -> tuple[Chain, list[Tensor]]:
    """Infinities of both signs and NaN at a border, in a corner and inside, beside numbers that no plane holds."""
    how, shape, _ = CASES[name]
    chain = Builder(how.dims, how).op("leaky_relu", slope=0.5).chain()
    x, weight, *rest = (t.clone() for t in drawn(chain, (2, shape[1], *[1] * (how.dims - 2), 7, 6), torch.float32))
    plane = x[..., 0, :, :] if how.dims == 3 else x
    plane[0, 0, 1, 1], plane[0, -1, 6, 5], plane[1, -1, 0, 0], plane[1, 0, 5, 3] = (
        *(torch.inf, -torch.inf, torch.inf),
        torch.nan,
    )
    plane[:, :, 2, 2] *= 1e-30
    weight.view(-1)[1::4] *= 1e-25
    return chain, [x, weight, *rest]


@pytest.mark.parametrize(
    ("name", "precision"),
    [("3 channels", "fp32"), ("8 channels", "tf32"), ("k4 along x", "fp32"), ("3-D, 3 channels", "fp32")],
)
def test_infinities_come_out_as_of_pytorch(name: str, precision: str) -> None:
    assert infinities_are_kept(*infinite(name), precision)


def infinities_are_kept(chain: Chain, tensors: Sequence[Tensor], precision: str = "fp32") -> bool:
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    assert {float(y) for y in truth[truth.isinf()]} == {torch.inf, -torch.inf}
    assert bool(truth.isnan().any())
    plan = planned(chain, tensors, precision)
    assert isinstance(plan.own, Gemm)
    assert plan.own.unfolds
    assert plan.own.arithmetic.keeps_infinities
    with torch.no_grad():
        ours = run_plan(plan, tensors)
    off = (ours.double() - truth)[truth.isfinite()].abs().max()
    return same_where_not_finite(ours, truth.float()) and float(off) < (1e-4 if precision == "fp32" else 5e-2)


# the right text, the wrong one, a case that tells them apart
MUTANTS = {
    "taps before channels": ("unfold", "o_c = o_j // (UNFOLDED_H * UNFOLDED_W)", "o_c = o_j % C", "8 channels"),
    "columns in another order": (
        "unfold",
        "t_x = o_j % UNFOLDED_W",
        "t_x = UNFOLDED_W - 1 - o_j % UNFOLDED_W",
        "8 channels",
    ),
    "y and x in another order": (
        "unfold",
        "t_y = o_j // UNFOLDED_W % UNFOLDED_H",
        "t_y = UNFOLDED_H - 1 - o_j // UNFOLDED_W % UNFOLDED_H",
        "3 channels",
    ),
    "left of the border": ("unfold", "& (x >= 0) & (x < W)", "& (x < W)", "8 channels"),
    "below the border": ("unfold", "(y >= 0) & (y < H)", "(y >= 0)", "3-D, 3 channels"),
    "in front of the border": ("unfold", "(z >= 0) & (z < D)", "(z < D)", "3-D, 3 channels"),
    "one row of a program": (
        "unfold",
        "// blocks * ROWS_PER_PROGRAM + i",
        "// blocks * ROWS_PER_PROGRAM",
        "3 channels",
    ),
    "a weight in another order": (
        "pack",
        "kw) * UNFOLDED_TAPS + o % C_PACKED % UNFOLDED_TAPS",
        "kw) * UNFOLDED_TAPS",
        "3 channels",
    ),
    "a weight that is not turned": ("pack", "TAP_ROWS * KW * UNFOLDED_TAPS - 1 - tap", "tap", "transposed"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_seen_to_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, right, wrong, case = MUTANTS[name]
    how, shape, _ = CASES[case]
    chain = with_norm(how)
    tensors = drawn(chain, shape, torch.float32)
    replace_text(monkeypatch, file, right, wrong)
    assert error(chain, tensors) > 1e-3


def test_a_number_that_becomes_zero_in_its_plane_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: an infinite weight times it would be NaN."""
    how = conv(2, (3, 5))
    chain = Builder(2, how).op("mul", -1.0).chain()
    tensors = [t.clone() for t in drawn(chain, (1, 3, 5, 6), torch.float32)]
    tensors[0][:, :, 2, 2] *= 1e-30
    tensors[1][1, 1] = -torch.inf
    truth = reference.evaluate(chain, tensors, dtype=torch.float64).float()

    def is_kept() -> bool:
        plan: Plan = planned(chain, tensors)
        with torch.no_grad():
            return same_where_not_finite(run_plan(plan, tensors), truth)

    assert is_kept()
    replace_text(monkeypatch, "planes", "(not_zero(given, scaled) if KEEPS_INF else scaled)", "scaled")
    assert not is_kept()
