"""Gradients through softmaxes and reductions over channels, by Triton's interpreter: values, ties, what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

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
from postlude.stages import channels
from run.test_channels import COLUMNS
from run.test_gpu import CARD, library_convolution
from run.test_training import gradients
from tracing import kernel_calls
from wrong_kernels import replace_text

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("poisoned_memory"),
]
library_convolution = library_convolution
LAYOUTS = ["contiguous", "channels_last"]
REDUCED = ["sum", "mean", "logsumexp", "amax", "amin", "max", "min"]
SOFT = ["softmax", "log_softmax", "normalize"]


@pytest.fixture
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles for each sample, however few its positions."""
    for name in ("channels_tile", "gradient_tile"):
        whole = getattr(channels, name)
        monkeypatch.setattr(channels, name, lambda *sizes, whole=whole: (16, whole(*sizes)[1]))


def training(chain: Chain, tensors: Sequence[Tensor], memory: str = "default") -> Training:
    """By a plan that has all of the chain."""
    problem = dataclasses.replace(problem_of(tensors, memory=memory), device="cuda", needs_grad=True)
    plan = lower(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.chain == chain, plan.reasons
    return Training(plan, chain)


def made(chain: Chain, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> list[Tensor]:
    tensors = tensors_for(chain, shape, dtype, "cpu", 0, "normal", layout)  # type: ignore[arg-type]
    return [t if role == "running" else t.requires_grad_() for t, role in zip(tensors, chain.roles)]


def worst(chain: Chain, tensors: Sequence[Tensor], memory: str = "default") -> float:
    """Of the result and of all gradients: the largest error, as a part of the largest number."""
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    truth = gradients(lambda ts: reference.evaluate(chain, ts, dtype=torch.float64), wide)
    ours = gradients(training(chain, tensors, memory), tensors)
    found = [((one.double() - true).abs().max() / (true.abs().max() + 1e-3)) for one, true in zip(ours, truth)]
    return float(torch.nan_to_num(torch.stack(found), nan=torch.inf).max())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", [*REDUCED, *SOFT])
@pytest.mark.usefixtures("short_tiles", "library_convolution")
def test_every_operator_alone_and_among_others(op: str, layout: str) -> None:
    def over(built: Builder, keepdim: bool = True) -> Builder:
        return built.softmax(op) if op in SOFT else built.reduce(op, "channels", keepdim)

    alone = over(Builder(2).op("mul", 0.5)).chain()
    assert worst(alone, made(alone, (2, 17, 5, 7), torch.float64, layout)) < 1e-12
    one = over(Builder(2, conv(2, (3, 1))).op("silu"), keepdim=False).op("mul", "one").chain()
    assert worst(one, made(one, (2, 3, 5, 6), torch.float64, layout)) < 1e-12
    rich = over(Builder(3, conv(3, (2, 5), 2)).op("mul", "channel").norm(1, affine=False).op("tanh"))
    rich = rich.op("add", "one").op("sigmoid").op("mul", rich.value)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        assert worst(rich.chain(), made(rich.chain(), (2, 2, 4, 3, 5), dtype, layout)) < tolerance


MIXED = [
    Builder(2, conv(2, (3, 6))).softmax().op("add", "channel").op("mul", 2.0).op("sigmoid"),
    Builder(2).norm(1).op("tanh").softmax().op("add", "full").op("mul", Value(1)).op("mul", "row"),
    Builder(2).batch_norm().op("silu").softmax("log_softmax").op("mul", "channel"),
    Builder(2).softmax().op("sub", "channel").op("silu").reduce("max", "channels").op("relu"),
    Builder(2).softmax().op("mul", "channel").softmax("log_softmax"),
    Builder(2).op("mul", 1.5).softmax("normalize", 4.2).op("mul", "channel").op("silu"),  # eps is larger for some
    Builder(2).op("mul", "one").reduce("logsumexp", "channels").op("sub", Slot(1)).op("sigmoid").op("mul", Value(2)),
    Builder(2, conv(2, (3, 6))).norm(3).op("tanh").op("hardswish").op("add", Value(0)).reduce("logsumexp", "channels"),
    Builder(2, conv(2, (3, 6))).op("mul", 2.0).reduce("min", "channels", True).op("tanh").op("tanh"),
]


@pytest.mark.parametrize("memory", ["default", "lean"])
@pytest.mark.parametrize("built", MIXED, ids=lambda built: str(built.chain()))
@pytest.mark.usefixtures("short_tiles", "library_convolution")
def test_several_in_a_row_and_what_is_read_around_them(built: Builder, memory: str) -> None:
    chain = built.chain()
    if memory == "lean" and chain.producer is None:
        pytest.skip("nothing is computed again")
    tensors = made(chain, (2, 3 if chain.producer else 17, 5, 7), torch.float64, LAYOUTS[memory == "lean"])
    assert worst(chain, tensors, memory) < 1e-11


@pytest.mark.parametrize("end", ["softmax", "min"])
def test_after_a_convolution_of_our_own(end: str) -> None:
    built = Builder(2, conv(2, (3, 6), padding=1)).op("add", "channel")
    chain = (built.softmax() if end == "softmax" else built.reduce(end, "channels")).chain()
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        tensors = made(chain, (2, 3, 5, 6), dtype)
        assert training(chain, tensors).plan.gradients.of_weight is not None
        assert worst(chain, tensors) < tolerance


def test_of_equal_values_max_chooses_the_first_and_amax_divides() -> None:
    """As PyTorch does."""
    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0, 3.0]], dtype=torch.float64).T.reshape(1, 5, 1, 2)
    for op in ("max", "min", "amax", "amin"):
        chain, x = Builder(2).op("mul", 2.0).reduce(op, "channels").chain(), x.detach().requires_grad_()
        ours, true = (
            gradients(run, [x])[1] for run in (training(chain, [x]), lambda ts, c=chain: reference.evaluate(c, ts))
        )
        torch.testing.assert_close(ours, true, rtol=0, atol=0)


@pytest.mark.parametrize("op", [*REDUCED, *SOFT])
def test_nan_and_infinities_are_pytorchs(op: str) -> None:
    x = torch.tensor(COLUMNS).T.reshape(1, 3, 3, 3).requires_grad_()
    built = Builder(2).op("add", 0.0)
    chain = (built.softmax(op) if op in SOFT else built.reduce(op, "channels")).chain()
    ours, true = (gradients(run, [x])[1] for run in (training(chain, [x]), lambda ts: reference.evaluate(chain, ts)))
    torch.testing.assert_close(ours, true, equal_nan=True)


def kept(chain: Chain, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], str]]:
    """What training keeps beside what it was given."""
    tensors = made(chain, shape, torch.float32)
    run = training(chain, tensors)
    program = run.program(tensors, [t.requires_grad for t in tensors])
    return sorted((b.shape, b.dtype) for b in program.kept if b not in program.given)


@pytest.mark.usefixtures("library_convolution")
def test_a_chosen_channel_is_kept_instead_of_the_value_as_pytorch_does() -> None:
    shape, small = (2, 3, 5, 6), (2, 3, 4)
    start = Builder(2, conv(2, (3, 6))).op("mul", 2.0).reduce("min", "channels", True)
    assert kept(start.chain(), shape) == [(small, "int16")]
    assert kept(start.op("tanh").chain(), shape) == [(small, "float32"), (small, "int16")]
    assert kept(Builder(2, conv(2, (3, 6))).reduce("mean", "channels").chain(), shape) == []
    soft = Builder(2, conv(2, (3, 6))).softmax()
    assert kept(soft.chain(), shape) == [((2, 6, 3, 4), "float32")]  # the result itself
    assert training(soft.chain(), made(soft.chain(), shape, torch.float32)).plan.gradients.from_result
    largest = Builder(2, conv(2, (3, 6))).reduce("amax", "channels")
    assert ((2, 6, 3, 4), "float32") in kept(largest.chain(), shape)


@pytest.mark.usefixtures("library_convolution")
def test_no_pass_beside_those_of_other_gradients() -> None:
    chain = Builder(2, conv(2, (3, 6))).norm(3).op("tanh").reduce("logsumexp", "channels").chain()
    tensors = made(chain, (2, 3, 5, 6), torch.float32)
    program = training(chain, tensors).program(tensors, [True] * len(tensors))
    names = [call.kernel for call in kernel_calls(program.backward)]
    assert names == ["sums_kernel", "combine_sums_kernel", "gradient_kernel", "add_channels_kernel"]


def second_derivatives_are_right(end: str) -> bool:
    built = Builder(2, conv(2, (2, 4))).op("add", "full")
    ends = {"softmax": lambda: built.softmax(), "max_pool": lambda: built.pool("max", 2)}
    chain = ends.get(end, lambda: built.reduce(end, "channels").op("tanh"))().chain()
    tensors = made(chain, (2, 2, 6, 5), torch.float64)

    def twice(run: Callable[[Sequence[Tensor]], Tensor]) -> list[Tensor]:
        y = run(tensors)
        first = torch.autograd.grad(y, tensors, torch.cos(y.detach()), create_graph=True)
        total = torch.stack([(one * torch.sin(torch.arange(one.numel()).view_as(one))).sum() for one in first]).sum()
        found = torch.autograd.grad(total, tensors, allow_unused=True)
        return [torch.zeros_like(t) if one is None else one for one, t in zip(found, tensors)]

    pairs = zip(twice(training(chain, tensors)), twice(lambda ts: reference.evaluate(chain, ts)))
    return all(torch.allclose(ours, true, rtol=1e-9, atol=1e-9) for ours, true in pairs)


@pytest.mark.parametrize("end", ["softmax", "max", "logsumexp", "max_pool"])
@pytest.mark.usefixtures("library_convolution")
def test_second_derivatives_are_those_of_the_first(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the value was not kept: what was chosen depends on tensors that no gradient reads."""
    assert second_derivatives_are_right(end)
    monkeypatch.setattr("postlude.stages.program.chooses", lambda _: False)
    assert second_derivatives_are_right(end) == (end in ("softmax", "logsumexp"))


MUTANTS = [
    # module, the right text, the wrong text, what tells them apart
    ("row_derivatives", "v * (g - row_sum(g * v, m_x))", "v * g", "softmax"),
    ("row_derivatives", "g - exp(v) * row_sum(g, m_x)", "g - row_sum(g, m_x)", "log_softmax"),
    ("row_derivatives", "g * exp(x - v)", "g * exp(x)", "logsumexp"),
    ("row_derivatives", "tl.where(o_c == place, g, 0.0)", "tl.where(o_c == place, 0.0, g)", "max"),
    ("row_derivatives", "tl.where(o_c == 0, g, 0.0)", "g", "max"),
    ("row_derivatives", "largest_share(g, -x, m_x)", "largest_share(g, x, m_x)", "amin"),
    ("row_derivatives", "base // C + o_s", "o_s", "sum"),
    ("channels", "o_c, 1 << 30)", "o_c * 0 + 2, 1 << 30)", "max"),
    ("channels", "row_place(b_x, b_y, o_c[None, :])", "row_place(-b_x, b_y, o_c[None, :])", "min"),
    ("channels", "p_reduced + base + o_s, b_y.to", "p_reduced + base + o_s, (2 * b_y).to", "logsumexp"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}: {m[2][:40]}")
def test_a_wrong_kernel_is_seen_to_fail(mutant: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong, op = mutant
    built = Builder(2).op("mul", "channel")
    built = built.softmax(op) if op in SOFT else built.reduce(op, "channels").op("mul", "one").op("tanh")
    chain = built.chain()
    tensors = made(chain, (2, 6, 3, 4), torch.float64)
    assert worst(chain, tensors) < 1e-12
    replace_text(monkeypatch, module, right, wrong)
    compose.cache_clear()
    try:
        assert worst(chain, tensors) > 1e-3
    finally:
        compose.cache_clear()
