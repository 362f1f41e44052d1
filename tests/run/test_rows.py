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
from postlude.plan import Plan, Refusal, problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.run import rows_gradient
from postlude.run.programs import HEADER, compose
from run.test_gpu import CARD, fused
from run.test_training import assert_gradients, gradients, training

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
    "and another norm": (GELU.norm(3).op("relu").chain(), (2, 2, 3, 4)),
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


@pytest.mark.parametrize("name", ["the last axis", "a whole sample"])
def test_is_right_by_the_rule(name: str) -> None:
    chain, shape = CHAINS[name]
    shape = (*shape[:-1], 9)
    verdict = verify_chain(fused, chain, chain_points(chain, shape, torch.float32, "cpu", seeds=3))
    assert verdict.right, verdict


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_autograds(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_gradient, "_MOST_TILES", 2)
    monkeypatch.setattr("postlude.run.rows._TILE", 16)  # several rows, tiles and chunks
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


MUTANTS = {
    "no centring": ("centred = x - mean", "centred = x"),
    "the unbiased variance": ("centred * centred, m_x, L)", "centred * centred, m_x, L - 1)"),
    "the channel of the first row": ("((first + o_r) // R % C)", "((first + o_r * 0) // R % C)"),
    "the last tile only is summed": ("(totals[i] + tl.sum(block),)", "(tl.sum(block),)"),
    "the first tile only": ("(i_chunk * TILES + i_tile) * BLOCK_R", "i_chunk * TILES * BLOCK_R"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_seen_to_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.run.rows._TILE", 64)
    assert error() < 1e-9
    module = importlib.import_module("postlude.kernels.triton.rows")
    source = Path(str(module.__file__)).read_text()
    right, wrong = MUTANTS[name]
    assert right in source
    changed = compose(HEADER + source.replace(right, wrong))
    for key in ("rows_kernel", "rows_gradient_kernel", "row_statistics", "row_mean"):
        monkeypatch.setattr(module, key, changed[key])
    monkeypatch.setattr("postlude.run.programs.compose", compose.__wrapped__)
    monkeypatch.setattr(rows_gradient, "compose", compose.__wrapped__)
    from postlude.run import rows

    monkeypatch.setattr(rows, "program", rows.program.__wrapped__)
    assert error() > 1e-4


def error() -> float:
    """The largest error of the result or of a gradient, as a part of its largest element."""
    chain, shape = CHAINS["no convolution"]
    tensors = [t.requires_grad_() for t in tensors_for(chain, shape, torch.float64, family="hierarchical")]
    truth = gradients(lambda ts: reference.evaluate(chain, ts), tensors)
    found = gradients(training(chain, tensors), tensors)
    off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, truth, strict=True)]
    return float(torch.nan_to_num(torch.tensor(off), nan=torch.inf).max())
