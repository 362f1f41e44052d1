"""Chains that end in a reduction over channels, by Triton's interpreter: values, what is not finite, gradients."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import BY_NAME, Builder, Case, conv
from postlude import reference
from postlude.chain import Chain, Value
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.run import execute
from postlude.run.compose import HEADER, compose
from postlude.stages import channels
from postlude.words import REDUCTIONS
from run.test_gpu import CARD, fused, library_convolution
from run.test_training import gradients

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
library_convolution = library_convolution
OPS = [op for op, spans in REDUCTIONS.items() if spans == ("channels",)]
LAYOUTS = ["contiguous", "channels_last"]
SOFT, HARD = (BY_NAME[name] for name in ("conv norm residual logsumexp", "conv mul norm clamp mul max"))


@pytest.fixture
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles for each sample, however few its positions."""
    whole = channels.channels_tile
    monkeypatch.setattr(channels, "channels_tile", lambda *sizes: (16, whole(*sizes)[1]))


@pytest.mark.parametrize(("case", "layout"), [(SOFT, "contiguous"), (HARD, "channels_last")])
@pytest.mark.usefixtures("poisoned_memory", "library_convolution", "short_tiles")
def test_is_right_by_the_rule(case: Case, layout: str) -> None:
    points = chain_points(case.chain, case.shape, torch.float32, "cpu", 2, layout)  # type: ignore[arg-type]
    verdict = verify_chain(fused, case.chain, points)
    assert verdict.right, verdict


def worst(chain: Chain, shape: tuple[int, ...], dtype: torch.dtype, layout: str, family: str = "normal") -> float:
    """The largest error, as a part of the largest number; dtype, shape and strides are PyTorch's."""
    tensors = list(tensors_for(chain, shape, dtype, "cpu", 0, family, layout))  # type: ignore[arg-type]
    ours, theirs = fused(chain, tensors), reference.evaluate(chain, tensors)
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    return float((ours.double() - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("poisoned_memory", "short_tiles")
def test_every_operator_at_odd_sizes(op: str, layout: str) -> None:
    for count, keepdim in ((1, True), (5, False), (17, True), (64, False)):
        chain = Builder(2).op("mul", "row").op("add", "full").reduce(op, "channels", keepdim).chain()
        assert worst(chain, (2, count, 5, 7), torch.float64, layout) < 1e-14
    chain = Builder(3).op("add", "channel").norm(1).op("tanh").op("mul", Value(0)).reduce(op, "channels").chain()
    assert worst(chain, (2, 9, 3, 1, 5), torch.float64, layout) < 1e-14
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
        assert worst(chain, (2, 9, 3, 2, 5), dtype, layout) < tolerance


@pytest.mark.usefixtures("poisoned_memory")
def test_the_most_channels_fit_a_tile() -> None:
    chain = Builder(2).norm(64).reduce("logsumexp", "channels").chain()
    assert worst(chain, (1, 512, 3, 7), torch.float64, "contiguous") < 1e-14


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("poisoned_memory")
def test_after_our_own_convolution_without_a_norm(layout: str) -> None:
    for built in (Builder(2, conv(2, (3, 6))).op("relu").op("add", "full"), Builder(2, conv(2, (3, 6)))):
        assert worst(built.reduce("amin", "channels").chain(), (2, 3, 5, 6), torch.float64, layout) < 1e-13


SOFT_ENDS = [
    Builder(2).softmax("log_softmax").op("mul", "channel"),
    Builder(2, conv(2, (3, 6))).softmax().op("add", "channel").op("mul", 2.0).op("sigmoid"),
    Builder(2).norm(1).op("tanh").softmax().op("add", "full").op("mul", Value(1)).op("mul", "row"),
    Builder(2).op("silu").reduce("min", "channels", True).op("tanh").op("tanh"),
    Builder(2).op("silu").reduce("logsumexp", "channels", True).op("sub", "one").op("clamp", low=-1.0, high=1.0),
    Builder(2).softmax().op("sub", "channel").op("silu").reduce("max", "channels").op("relu"),
    Builder(2).op("mul", 2.0).reduce("mean", "channels").op("relu"),
    Builder(2).op("mul", "channel").reduce("sum", "channels", True),
    Builder(2).softmax().pool("max", 2),
    Builder(2).softmax("normalize", 1e-12).op("mul", 4.0).op("mul", "channel").op("silu"),
    Builder(2, conv(2, (3, 6))).softmax("normalize", 1e-12).op("mul", "channel").op("add", "channel"),
    Builder(2).op("add", "full").softmax("normalize", 5.0),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("built", SOFT_ENDS, ids=lambda built: str(built.chain()))
@pytest.mark.usefixtures("poisoned_memory", "short_tiles")
def test_softmax_and_what_follows(built: Builder, layout: str) -> None:
    count = 3 if built.producer is not None else 17
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 2e-6), (torch.float16, 2e-3)):
        assert worst(built.chain(), (2, count, 5, 7), dtype, layout) < tolerance


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "normalize"])
def test_softmax_of_what_is_not_finite_is_pytorchs(op: str) -> None:
    x = torch.tensor(COLUMNS).T.reshape(1, 3, 3, 3)
    chain = Builder(2).softmax(op).chain()
    assert fused(chain, [x]).isclose(reference.evaluate(chain, [x]), equal_nan=True).all()
    large = Builder(2).op("mul", 1e4).softmax(op).chain()
    assert worst(large, (2, 5, 3, 4), torch.float32, "contiguous") < 1e-6


LANES = {
    "softmax": ("tl.where(m_c[None, :], exp(b_x - row_shift(b_x, m_c)), 0.0)", "exp(b_x - row_shift(b_x, m_c))"),
    "normalize": ("b_x = tl.where(m_c[None, :], b_x, 0.0)\n", "pass\n"),
}


@pytest.mark.parametrize("op", LANES)
def test_lanes_past_the_last_channel_that_count_are_seen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: they do."""
    module = importlib.import_module("postlude.kernels.triton.channels")
    source, (right, wrong) = Path(str(module.__file__)).read_text(), LANES[op]
    chain, shape = Builder(2).op("add", 1.0).softmax(op).chain(), (2, 5, 3, 4)
    assert source.count(right) == 1
    assert worst(chain, shape, torch.float64, "contiguous") < 1e-13
    made = compose(HEADER + source.replace(right, wrong))
    monkeypatch.setattr(module, f"channel_{op}", made[f"channel_{op}"])
    compose.cache_clear()
    assert worst(chain, shape, torch.float64, "contiguous") > 1e-3
    monkeypatch.undo()
    compose.cache_clear()


def test_large_values_do_not_overflow() -> None:
    chain = Builder(2).op("mul", 1e4).reduce("logsumexp", "channels").chain()
    assert worst(chain, (2, 5, 3, 4), torch.float32, "contiguous") < 1e-6


COLUMNS = [
    [1.0, -math.inf, 2.0],
    [-math.inf] * 3,
    [1.0, math.inf, 2.0],
    [math.inf] * 3,
    [-math.inf, math.inf, 0.0],
    [1.0, math.nan, 2.0],
    [math.nan, 1.0, math.inf],
    [math.nan] * 3,
    [-math.inf, math.nan, -math.inf],
]


def follows_pytorch(op: str, layout: str = "contiguous") -> bool:
    """On columns of channels with NaN and infinities."""
    x = torch.tensor(COLUMNS).T.reshape(1, 3, 3, 3)
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x
    chain = Builder(2).op("add", 0.0).reduce(op, "channels").chain()
    return bool(fused(chain, [x]).isclose(reference.evaluate(chain, [x]), equal_nan=True).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_nan_and_infinities_are_pytorchs(op: str, layout: str) -> None:
    assert follows_pytorch(op, layout)


@pytest.mark.parametrize(
    ("op", "right", "wrong"),
    [
        ("amax", "tl.max(b_x, axis=1) + nan", "tl.max(b_x, axis=1)"),
        ("min", 'tl.where(b_x <= float("inf"), 0.0, b_x)', "b_x * 0.0"),
        ("logsumexp", 'tl.abs(shift) == float("inf")', "shift != shift"),
    ],
)
def test_lost_nan_and_infinities_are_seen(op: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("postlude.kernels.triton.channels")
    source = Path(str(module.__file__)).read_text()
    assert source.count(right) == 1
    monkeypatch.setattr(module, "channels_kernel", compose(HEADER + source.replace(right, wrong))["channels_kernel"])
    assert not follows_pytorch(op)


def trained(chain: Chain, tensors: Sequence[Tensor], memory: str = "default") -> Callable[[Sequence[Tensor]], Tensor]:
    problem = dataclasses.replace(problem_of(tensors, memory=memory), device="cuda", needs_grad=True)
    plan = lower(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan)
    assert plan.trains
    assert plan.gradients.is_lean == (memory == "lean" and chain.producer is not None)
    return execute.prepare(chain, plan)


@pytest.mark.usefixtures("library_convolution")
def test_gradients_of_a_softmax_are_pytorchs_after_the_backward_passes() -> None:
    chain = Builder(2, conv(2, (2, 4))).norm(2).op("silu").softmax().op("mul", "channel").chain()
    tensors = [t.requires_grad_() for t in tensors_for(chain, (2, 2, 5, 4), torch.float64)]
    truth = gradients(lambda ts: reference.evaluate(chain, ts), tensors)
    for ours, true in zip(gradients(trained(chain, tensors), tensors), truth, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("memory", ["default", "lean"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("library_convolution")
def test_gradients_are_the_backward_passes_and_pytorchs_at_the_end(op: str, memory: str) -> None:
    chain = Builder(2, conv(2, (2, 4))).norm(2).op("silu").op("mul", "channel").reduce(op, "channels", True).chain()
    tensors = [t.requires_grad_() for t in tensors_for(chain, (2, 2, 5, 4), torch.float64)]
    truth = gradients(lambda ts: reference.evaluate(chain, ts), tensors)
    for ours, true in zip(gradients(trained(chain, tensors, memory), tensors), truth, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-9)


def test_of_equal_values_max_chooses_one_and_amax_divides() -> None:
    """As PyTorch does: the first three channels are the last three once more."""
    found = {}
    for op in ("max", "amax"):
        chain = Builder(2).norm(1, affine=False).op("silu").reduce(op, "channels").chain()
        half = tensors_for(chain, (2, 3, 5, 4), torch.float64)[0]
        tensors = [torch.cat((half, half), 1).requires_grad_()]
        truth = gradients(lambda ts, chain=chain: reference.evaluate(chain, ts), tensors)  # type: ignore[misc]
        found[op] = gradients(trained(chain, tensors), tensors)
        for ours, true in zip(found[op], truth, strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found["max"][1], found["amax"][1])
