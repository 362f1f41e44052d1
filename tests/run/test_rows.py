"""layer_norm by Triton's interpreter: values and gradients in one pass each, and mutants of both."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
import torch

from cases import Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.kernels.triton import rows as rows_kernels
from postlude.plan import Plan, Refusal, Store, problem_of
from postlude.plan.boxes import Boxes
from postlude.plan.gemm import Gemm
from postlude.plan.gpu import lower_for_gpu
from postlude.run.compose import HEADER, compose
from run.test_gpu import CARD, fused
from run.test_phases import FLAT, planned, transposed, with_infinities
from run.test_training import assert_gradients, gradients, training
from tracing import run_plan

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("poisoned_memory")]
GELU = Builder(2, conv(2, (2, 3), 2, transposed=True, stride=2)).op("add", "one").layer_norm()
GELU = GELU.op("gelu", approximate="none").op("mul", "channel")
TWO = Builder(2, conv(2, (2, 3), padding=1)).op("mul", "full").layer_norm(2).op("silu").op("add", "full")
BARE = Builder(3).op("mul", "channel").layer_norm(affine=False).op("mul", "channel")
SAMPLE = Builder(2).op("mul", "channel").layer_norm(3, eps=1e-3).op("add", "channel")
GATED = Builder(2).op("mul", "row").layer_norm().op("silu").op("mul", "row")
CHAINS: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "the last axis": (GELU.chain(), (2, 2, 3, 4)),
    "two axes": (TWO.chain(), (2, 2, 5, 4)),
    "no convolution": (BARE.chain(), (2, 2, 2, 9, 5)),
    "a whole sample": (SAMPLE.chain(), (3, 4, 3, 5)),
    "gates": (GATED.chain(), (3, 2, 2, 5)),
    "gates of whole samples": (Builder(2).op("mul", "row").layer_norm(3).op("add", "row").chain(), (5, 3, 2, 3)),
    "another's layout": (Builder(2).layer_norm().op("rsub", "full").chain(), (2, 3, 4, 5)),
    "and another norm": (Builder(2).op("silu").layer_norm().norm(3).op("relu").chain(), (2, 3, 4, 5)),
}
TRAINED = ("the last axis", "two axes", "no convolution", "gates")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", CHAINS)
def test_values_strides_and_dtypes_are_pytorchs(name: str, layout: str) -> None:
    chain, shape = CHAINS[name]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.float16, 1e-2)):
        tensors = tensors_for(chain, shape, dtype, layout=layout)  # type: ignore[arg-type]
        ours, theirs = fused(chain, list(tensors)), reference.evaluate(chain, tensors)
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        truth = reference.evaluate(chain, tensors, dtype=torch.float64)
        torch.testing.assert_close(ours.double(), truth, rtol=tolerance, atol=tolerance * float(truth.abs().max()))


# Tiles of 32 elements, of rows of one channel or of several, full or not.
TILED = {"one, full": (2, 3, 4, 8), "one": (2, 3, 4, 5), "several, full": (2, 3, 2, 8), "several": (3, 3, 1, 5)}


def tile_error(shape: tuple[int, ...]) -> float:
    chain = Builder(2).op("mul", "channel").op("add", "row").layer_norm().op("mul", "channel").chain()
    tensors = tensors_for(chain, shape, torch.float64)
    return float((fused(chain, list(tensors)) - reference.evaluate(chain, tensors)).abs().max())


@pytest.mark.parametrize("name", TILED)
def test_tiles_of_one_channel_and_of_several(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.stages.rows._TILE", 32)
    assert tile_error(TILED[name]) < 1e-10
    source = Path(str(rows_kernels.__file__)).read_text()
    right = "tl.program_id(0) // (ROWS_PER_CHANNEL // BLOCK_ROWS) % C"
    assert right in source
    wrong = compose(HEADER + source.replace(right, "tl.program_id(0) // ROWS_PER_CHANNEL % C"))
    monkeypatch.setattr(rows_kernels, "rows_kernel", wrong["rows_kernel"])
    assert (tile_error(TILED[name]) > 1e-3) == (name in ("one", "one, full"))


@pytest.mark.parametrize("name", ["the last axis", "a whole sample"])
def test_is_right_by_the_rule(name: str) -> None:
    chain, shape = CHAINS[name]
    shape = (1, *shape[1:-1], 9)
    verdict = verify_chain(fused, chain, chain_points(chain, shape, torch.float32, "cpu", seeds=2))
    assert verdict.right, verdict


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_autograds(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.stages.rows._MOST_TILES", 2)
    monkeypatch.setattr("postlude.stages.rows._TILE", 16)  # several rows, tiles and chunks
    if layout == "channels_last":  # ours is slow by the interpreter, and writes rows whatever it reads
        monkeypatch.setattr("postlude.plan.gpu.own_convolution", lambda *_: "not in this test")
    chain, shape = CHAINS[name]
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5))[: 2 if layout == "contiguous" else 1]:
        tensors = [t.requires_grad_() for t in tensors_for(chain, shape, dtype, layout=layout)]  # type: ignore[arg-type]
        assert_gradients(chain, tensors, tolerance=tolerance)
    for slot in range(2, len(tensors)):
        tensors[slot].requires_grad_(False)
    assert_gradients(chain, tensors, "lean", tolerance)


def test_gradcheck_over_the_real_kernels() -> None:
    chain, shape = CHAINS["no convolution"]
    tensors = [t.requires_grad_() for t in tensors_for(chain, shape, torch.float64)]
    run = training(chain, tensors)
    assert torch.autograd.gradcheck(lambda *ts: run(ts), tensors, fast_mode=True)


def outcome(chain: Chain, shape: tuple[int, ...], trains: bool = False) -> Plan | Refusal:
    tensors = tensors_for(chain, shape, torch.float32)
    problem = dataclasses.replace(problem_of(tensors), needs_grad=trains)
    return lower_for_gpu(chain, problem, CARD, even_if_slower=True)


def test_one_launch_where_it_is_the_only_norm() -> None:
    plan = outcome(*CHAINS["no convolution"])
    assert isinstance(plan, Plan)
    assert (plan.launches, len(plan.passes)) == (1, 1)


def test_what_does_not_fit_is_refused_with_its_reason() -> None:
    chain = Builder(2).layer_norm(2, affine=False).chain()
    assert isinstance(outcome(chain, (1, 2, 64, 128)), Plan)
    assert "more than 8192 elements" in str(outcome(chain, (1, 2, 64, 129)))
    assert "whole samples" in str(outcome(*CHAINS["a whole sample"], trains=True))


STRAIGHT, TURNED = conv(2, (3, 5), padding=1), transposed(FLAT["k3s2p1op1"])
INFINITE = {
    "stride 1": Builder(2, STRAIGHT).op("add", "one").layer_norm().op("gelu", approximate="none").chain(),
    "stride 1, saturated": Builder(2, STRAIGHT).op("tanh").layer_norm(affine=False).chain(),
    "by phase": Builder(2, TURNED).layer_norm().op("mul", 2.0).chain(),
    "by phase, saturated": Builder(2, TURNED).op("hardsigmoid").layer_norm().chain(),
}


def kept_in_rows(chain: Chain, precision: str = "fp32", **arithmetic: bool) -> bool:
    """Whether NaN is where float64 has it, and all else as near to it; changes of the arithmetic are mutants."""
    tensors = with_infinities(chain)
    tensors[0][1, 1, 5, 0] = torch.inf  # what is read behind the row before
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    is_finite = truth.isfinite()
    assert 0.1 < float(is_finite.float().mean()) < 0.9
    plan = planned(chain, tensors, precision)
    assert isinstance(plan.own, Gemm)
    own = dataclasses.replace(plan.own, arithmetic=dataclasses.replace(plan.own.arithmetic, **arithmetic))
    ours = run_plan(dataclasses.replace(plan, own=own), tensors)
    off = (ours.double() - truth)[is_finite].abs()
    return torch.equal(ours.isfinite(), is_finite) and float(off.max()) < (1e-4 if precision == "fp32" else 5e-2)


@pytest.mark.parametrize("name", INFINITE)
def test_an_infinity_stays_in_its_rows(name: str) -> None:
    assert kept_in_rows(INFINITE[name])
    assert "saturated" not in name or kept_in_rows(INFINITE[name], "tf32")


@pytest.mark.parametrize("name", ["stride 1, saturated", "by phase, saturated"])
def test_an_infinity_that_is_not_kept_is_seen(name: str) -> None:
    """Mutant: NaN of it, where a step before the norm makes a number of an infinity."""
    assert not kept_in_rows(INFINITE[name], keeps_infinities=False)


def test_an_infinity_in_a_widened_product_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: neighbouring outputs in a row of the product, which reads on into the next row."""
    monkeypatch.setattr("postlude.plan.convolve.norm_hides_infinities", lambda _: True)
    monkeypatch.setattr("postlude.plan.convolve.unfolded_product_for", lambda *_: None)
    assert not kept_in_rows(INFINITE["stride 1"])


def test_an_infinity_stays_in_its_rows_in_place() -> None:
    chain = Builder(2, conv(2, (16, 48), padding=1)).layer_norm().chain()
    tensors = [t.clone() for t in tensors_for(chain, (1, 16, 16, 16), torch.float16, family="normal")]
    tensors[0][0, 3, 2, 0] = torch.inf
    plan = lower_for_gpu(chain, problem_of(tensors), CARD, even_if_slower=True)
    assert isinstance(plan, Plan)
    assert isinstance(plan.own, Boxes)
    ours, truth = run_plan(plan, tensors), reference.evaluate(chain, tensors, dtype=torch.float64)
    assert torch.equal(ours.isfinite(), truth.isfinite())
    assert float((ours.double() - truth)[truth.isfinite()].abs().max()) < 1e-2


def test_a_step_that_is_taken_twice_is_seen() -> None:
    """Mutant: the convolution's pass stores what its steps make of the sums, and the rows' pass takes them again."""
    chain = Builder(2, TURNED).op("silu").layer_norm().chain()
    tensors = tensors_for(chain, (1, 3, 2, 3), torch.float32)
    plan, truth = planned(chain, tensors), reference.evaluate(chain, tensors, dtype=torch.float64)
    twice = dataclasses.replace(plan.passes[0], last=1, sink=Store())
    done = dataclasses.replace(plan, passes=(twice, plan.passes[1]))
    right, wrong = (float((run_plan(one, tensors) - truth).abs().max()) for one in (plan, done))
    assert right < 1e-4 < 1e-2 < wrong


MUTANTS = {
    "no centring": ("centred = x - mean", "centred = x"),
    "the unbiased variance": ("centred * centred, m_x, L)", "centred * centred, m_x, L - 1)"),
    "the channel of the first row": (
        "((first + o_r) // ROWS_PER_CHANNEL % C)",
        "((first + o_r * 0) // ROWS_PER_CHANNEL % C)",
    ),
    "the last tile only is summed": ("(totals[i] + tl.sum(block),)", "(tl.sum(block),)"),
    "the first tile only": (
        "(i_chunk * TILES_PER_PROGRAM + i_tile) * BLOCK_ROWS",
        "i_chunk * TILES_PER_PROGRAM * BLOCK_ROWS",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_seen_to_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.stages.rows._TILE", 64)
    assert error() < 1e-9
    module = importlib.import_module("postlude.kernels.triton.rows")
    source = Path(str(module.__file__)).read_text()
    right, wrong = MUTANTS[name]
    assert right in source
    changed = compose(HEADER + source.replace(right, wrong))
    for key in ("rows_kernel", "rows_gradient_kernel", "row_statistics", "row_mean"):
        monkeypatch.setattr(module, key, changed[key])
    monkeypatch.setattr("postlude.run.launch.compose", compose.__wrapped__)
    assert error() > 1e-4


def error() -> float:
    """The largest error of the result or of a gradient, as a part of its largest element."""
    chain, shape = CHAINS["no convolution"]
    tensors = [t.requires_grad_() for t in tensors_for(chain, shape, torch.float64, family="hierarchical")]
    truth = gradients(lambda ts: reference.evaluate(chain, ts), tensors)
    found = gradients(training(chain, tensors), tensors)
    off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, truth, strict=True)]
    return float(torch.nan_to_num(torch.tensor(off), nan=torch.inf).max())
