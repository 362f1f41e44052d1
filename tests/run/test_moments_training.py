"""Training of chains that need only moments, by Triton's interpreter: gradients, slabs, and what is kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import BY_NAME, Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.plan import Plan, problem_of
from postlude.plan.gemm import Gemm
from postlude.plan.gpu import lower_for_gpu
from postlude.run.chain_run import Training
from postlude.stages import backward
from run.test_gpu import CARD
from run.test_training import gradients, saved_bytes

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
SPACE = Builder(2, conv(2, (3, 4), padding=1, bias=False)).norm(2).op("mul", "channel").reduce("mean", "space").chain()
SUM = Builder(2, conv(2, (2, 4), 2)).norm(None).op("add", 0.5).reduce("sum", "sample").op("relu").chain()
CHAINS: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "23": (BY_NAME["23 small"].chain, (5, 3, 4, 5, 4)),
    "over space": (SPACE, (3, 3, 5, 4)),
    "sum": (SUM, (3, 2, 4, 5)),
}


def inputs(name: str, dtype: torch.dtype) -> list[Tensor]:
    chain, shape = CHAINS[name]
    return [t.requires_grad_() for t in tensors_for(chain, shape, dtype, family="hierarchical")]


def training(name: str, tensors: Sequence[Tensor], memory: str = "lean") -> Training:
    problem = dataclasses.replace(problem_of(tensors, memory=memory), needs_grad=True)
    plan = lower_for_gpu(CHAINS[name][0], problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert isinstance(plan.own, Gemm)
    assert plan.gradients.of_input is not None
    assert plan.gradients.of_weight is not None
    changed = dataclasses.replace(
        plan,
        own=dataclasses.replace(plan.own, rows=32),
        gradients=dataclasses.replace(
            plan.gradients,
            of_input=dataclasses.replace(plan.gradients.of_input, rows=32),
            of_weight=dataclasses.replace(plan.gradients.of_weight, splits=2),
            samples_again=2 if memory == "lean" else plan.gradients.samples_again,
        ),
    )
    return Training(changed, plan.chain)


def assert_gradients(name: str, tensors: Sequence[Tensor], tolerance: float, memory: str = "lean") -> None:
    chain = CHAINS[name][0]
    truth = gradients(lambda ts: reference.evaluate(chain, ts, dtype=torch.float64), tensors)
    for ours, true in zip(gradients(training(name, tensors, memory), tensors), truth, strict=True):
        assert (ours.shape, ours.dtype) == (true.shape, tensors[0].dtype)
        torch.testing.assert_close(
            ours.double(), true.double(), rtol=tolerance, atol=tolerance * float(true.abs().max() + 1)
        )


# In two planes the products have tests of their own (test_training.py): one case says that the slabs have theirs.
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance", "memory"),
    [
        *((name, torch.float64, 1e-9, memory) for name in CHAINS for memory in ("lean", "default")),
        ("sum", torch.float32, 1e-5, "lean"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_are_autograds(name: str, dtype: torch.dtype, tolerance: float, memory: str) -> None:
    assert_gradients(name, inputs(name, dtype), tolerance, memory)


@pytest.mark.parametrize("frozen", [(0, 1, 2), (1, 3, 4)], ids=str)
def test_frozen_tensors_get_nothing(frozen: tuple[int, ...]) -> None:
    tensors = inputs("23", torch.float64)
    for slot in frozen:
        tensors[slot].requires_grad_(False)
    assert_gradients("23", tensors, 1e-9)


def test_gradients_can_be_checked_and_differentiated_again() -> None:
    tensors = inputs("sum", torch.float64)
    run = training("sum", tensors)
    assert torch.autograd.gradcheck(lambda *ts: run(ts), tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *ts: run(ts), tensors, fast_mode=True)


def test_gradients_from_the_tensors_alone_are_the_same() -> None:
    tensors = inputs("sum", torch.float64)
    run = training("sum", tensors)
    y = run(tensors)
    with torch.no_grad():
        again = run.gradients_again(tensors, torch.ones_like(y), [True] * len(tensors))
    for kept, found in zip(torch.autograd.grad(y.sum(), tensors), again, strict=True):
        torch.testing.assert_close(found, kept, rtol=0, atol=0)


def test_lean_keeps_a_few_numbers_a_channel_and_the_default_no_more_than_eager() -> None:
    tensors = inputs("23", torch.float32)
    chain = CHAINS["23"][0]
    theirs = saved_bytes(lambda ts: reference.evaluate(chain, ts), tensors)
    lean, default = (saved_bytes(training("23", tensors, memory), tensors) for memory in ("lean", "default"))
    numbers = 2 * 8 * 5 * 6  # means and variances, float64, of 5 samples and 6 channels
    scales = 4 * 3  # the largest magnitudes of the input's channels, float32
    assert lean == numbers + scales
    assert default == lean + 4 * 5 * 6 * math.prod(chain.producer.output_space((4, 5, 4)))  # type: ignore[union-attr]
    assert lean < theirs
    assert default - theirs <= numbers + scales


def test_a_slab_is_bounded() -> None:
    chain = CHAINS["23"][0]
    tensors = [t.to("meta") for t in tensors_for(chain, (2, 3, 4, 4, 4), torch.float32)]
    tensors[0] = torch.empty(128, 3, 26, 34, 34, device="meta")
    problem = dataclasses.replace(problem_of(tensors, memory="lean"), device="cuda", needs_grad=True)
    plan = lower_for_gpu(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan)
    one = 6 * 24 * 32 * 32 * 4
    samples = plan.gradients.samples_again
    assert samples * one <= 32 << 20 < (samples + 1) * one


def test_without_the_variance_it_is_seen_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the means' gradient alone, as if the norm's spread were a constant."""
    tensors = inputs("23", torch.float64)
    honest = backward._of_moments

    def forgetful(*given: Any) -> tuple[list[Tensor | None], Tensor, Tensor]:
        grads, dmean, dvariance = honest(*given)
        return grads, dmean, torch.zeros_like(dvariance)

    monkeypatch.setattr(backward, "_of_moments", forgetful)
    with pytest.raises(AssertionError):
        assert_gradients("23", tensors, 1e-3)
