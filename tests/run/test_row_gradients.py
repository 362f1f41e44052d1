"""Gradients of what goes over a linear layer's features, in one pass by rows, by Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from postlude import reference
from postlude.chain import Chain, Slot, Value
from postlude.check import tensors_for
from postlude.plan import Plan, lower, problem_of
from postlude.run.chain_run import Training
from postlude.run.compose import compose
from postlude.stages import rows
from run.test_gpu import CARD
from run.test_training import gradients
from tracing import kernel_calls
from wrong_kernels import replace_text

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("poisoned_memory", "pytorchs_product"),
]
REDUCED = ["sum", "mean", "logsumexp", "amax", "amin", "max", "min"]
GELU = {"approximate": "none"}


@pytest.fixture
def pytorchs_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.plan.gpu.own_linear", lambda *_: "not in this test")


def layer(features: int = 12, bias: bool = True) -> Builder:
    return Builder(0, conv(0, (5, features), bias=bias))


CHAINS = {
    "softmax": layer(10).op("gelu", **GELU).softmax(),
    "log_softmax of one": layer(1).softmax("log_softmax").op("mul", "channel"),
    "softmax alone": layer(10).softmax(),
    "two of them": layer(7).softmax().op("mul", "channel").softmax("log_softmax"),
    "layer_norm": layer(10).op("silu").layer_norm().op("add", "full").op("mul", "full"),
    "layer_norm softmax": layer(9).layer_norm().op("tanh").softmax().op("mul", "channel"),
    "groups": layer(12).op("silu").op("add", "channel").norm(3),
    "groups, then more": layer(12).norm(4).op("silu").op("mul", "channel").op("silu").op("add", Value(1)),
    "γ once more": layer(12, bias=False).norm(2).op("silu").op("mul", Slot(2)),
    "one group": layer(10).norm(1).op("hardtanh", low=-0.5, high=0.5).op("mul", "one"),
    "no affine": layer(10).norm(2, affine=False).op("tanh"),
    **{
        f"{op} and more": layer(10)
        .op("silu")
        .op("mul", "channel")
        .reduce(op, "channels", True)
        .op("mul", "one")
        .op("tanh")
        for op in REDUCED
    },
    "clamped": layer(9)
    .op("mul", 2.0)
    .op("add", Value(1))
    .op("clamp", low=-1.0, high=1.0)
    .reduce("logsumexp", "channels"),
    "layer_norm mean": layer(10).layer_norm(affine=False).op("silu").reduce("mean", "sample"),
}


def training(chain: Chain, tensors: Sequence[Tensor]) -> Training:
    """By a plan that has all of the chain."""
    problem = dataclasses.replace(problem_of(tensors), device="cuda", needs_grad=True)
    plan = lower(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.chain == chain, plan.reasons
    return Training(plan, chain)


def made(chain: Chain, dtype: torch.dtype, batch: int = 7) -> list[Tensor]:
    return [t.requires_grad_() for t in tensors_for(chain, (batch, 5), dtype, "cpu", 0, "normal")]


def worst(chain: Chain, tensors: Sequence[Tensor]) -> float:
    """Of the result and of all gradients: the largest error, as a part of the largest number."""
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    truth = gradients(lambda ts: reference.evaluate(chain, ts, dtype=torch.float64), wide)
    ours = gradients(training(chain, tensors), tensors)
    assert [one.shape for one in ours] == [one.shape for one in truth]
    found = [((one.double() - true).abs().max() / (true.abs().max() + 1e-3)) for one, true in zip(ours, truth)]
    return float(torch.nan_to_num(torch.stack(found), nan=torch.inf).max())


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_are_autograds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = CHAINS[name].chain()
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        assert worst(chain, made(chain, dtype)) < tolerance
    monkeypatch.setattr(rows, "_TILE", 16)  # a row or two in a tile, several tiles for a program
    monkeypatch.setattr(rows, "_PROGRAMS", 2)
    assert worst(chain, made(chain, torch.float64, 9)) < 1e-11


def test_all_is_one_launch_but_for_what_is_summed_over_rows() -> None:
    chain = CHAINS["layer_norm softmax"].chain()
    tensors = made(chain, torch.float32)
    program = training(chain, tensors).program(tensors, [True] * len(tensors))
    assert [call.kernel for call in kernel_calls(program.backward)] == ["rows_gradient_kernel", "add_channels_kernel"]


def test_only_the_gradients_that_are_needed() -> None:
    chain = CHAINS["groups, then more"].chain()
    for frozen in range(2, len(chain.roles)):
        tensors = made(chain, torch.float64)
        tensors[frozen].requires_grad_(False)
        assert worst(chain, tensors) < 1e-11


@pytest.mark.parametrize("op", REDUCED)
def test_ties_nan_and_infinities_are_pytorchs(op: str) -> None:
    """The layer is the identity: an infinity in a row stays in its place, the rest of that row are NaN in any case."""
    features = torch.tensor([[1.0, 2.0, 2.0, 2.0], [3.0] * 4, [0.0, -1.0, -1.0, 5.0], [math.nan, 1.0, 2.0, 3.0]])
    chain = Builder(0, conv(0, (4, 4), bias=False)).op("leaky_relu", slope=0.5).reduce(op, "channels").chain()
    tensors = [features.requires_grad_(), torch.eye(4)]
    ours, true = (
        gradients(run, tensors)[1] for run in (training(chain, tensors), lambda ts: reference.evaluate(chain, ts))
    )
    torch.testing.assert_close(ours, true, equal_nan=True)


MUTANTS = [
    # module, the right text, the wrong text, a chain that tells them apart
    ("rows", "o_c = first + o_l\n        pitch = C", "o_c = o_l\n        pitch = C", "groups"),
    ("rows", "start.to(tl.int64) * pitch", "start.to(tl.int64) * L", "groups"),
    ("rows", "i_chunk = tl.program_id(0) // (C // L)", "i_chunk = tl.program_id(0) * 0", "groups"),
    ("rows", "p_g + start + o_r[:, None]", "p_g + o_r[:, None]", "mean and more"),
    ("row_derivatives", "return row_place(b_x, row_largest(b_x), o_c)[:, None]", "return o_c", "max and more"),
    ("row_derivatives", "max_place(-x, o_c, m_x)", "max_place(x, o_c, m_x)", "min and more"),
    ("row_derivatives", "tl.where(o_c == 0, g, 0.0)", "g", "sum and more"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}: {m[2][:40]}")
def test_a_wrong_kernel_is_seen_to_fail(mutant: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong, name = mutant
    monkeypatch.setattr(rows, "_TILE", 16)
    monkeypatch.setattr(rows, "_PROGRAMS", 4)
    chain = CHAINS[name].chain()
    tensors = made(chain, torch.float64, 9)
    assert worst(chain, tensors) < 1e-11
    replace_text(monkeypatch, module, right, wrong)
    compose.cache_clear()
    try:
        assert worst(chain, tensors) > 1e-3
    finally:
        compose.cache_clear()
