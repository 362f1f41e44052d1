"""Gradients of convolutions of few channels on a card: right by the rule, the same bits, and no memory to speak of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cases import CHAIN_23, Builder, conv
from postlude import hardware, reference
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.run.execute import Runner, prepare
from run.test_training_device import gradients

pytestmark = pytest.mark.gpu
FULL = (128, 3, 24, 32, 32)
CHAINS: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "23": (CHAIN_23, (6, 3, 15, 13, 37)),
    "padded": (Builder(3, conv(3, (3, 24), padding=1)).norm(8).reduce("mean", "sample").chain(), (3, 3, 9, 40, 70)),
    "transposed": (
        Builder(3, conv(3, (4, 16), transposed=True, bias=False)).norm(4).reduce("sum", "space").chain(),
        (3, 4, 7, 9, 11),
    ),
    "2-D": (Builder(2, conv(2, (1, 32), padding=1)).norm(4).reduce("mean", "space").chain(), (5, 1, 33, 65)),
    "longer": (
        Builder(2, conv(2, (2, 8), 2)).norm(2).op("mul", "channel").reduce("mean", "space").op("silu").chain(),
        (5, 2, 33, 30),
    ),
}


def ready(chain: Chain, tensors: Sequence[Tensor], precision: str = "auto") -> Runner:
    problem = dataclasses.replace(problem_of(tensors, precision), needs_grad=True)
    plan = lower_for_gpu(chain, problem, hardware.machine_for("cuda"), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    if hardware.machine_for("cuda").card.abilities.has_few_channel_gradients:
        assert plan.gradients.of_both is not None
    return prepare(chain, plan)


def in_precision(precision: str, call: Callable[[], None]) -> None:
    switch = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = switch.fp32_precision
    try:
        switch.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        call()
    finally:
        switch.fp32_precision = before


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", CHAINS)
def test_gradients_are_right_by_the_rule(name: str, precision: str) -> None:
    chain, shape = CHAINS[name]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    asked = "tf32" if precision == "tf32" else "auto"

    def check() -> None:
        points = chain_points(chain, shape, dtype, "cuda")
        verdict = verify_chain(lambda c, ts: ready(c, ts, asked)(ts), chain, points, asked, backward=True)
        assert verdict.right, verdict

    in_precision(precision, check)


@pytest.mark.parametrize("name", CHAINS)
def test_same_bits_every_time(name: str) -> None:
    chain, shape = CHAINS[name]
    tensors = [t.requires_grad_() for t in tensors_for(chain, shape, torch.float32, "cuda")]
    run = ready(chain, tensors)
    for one, other in zip(gradients(run, tensors), gradients(run, tensors), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-6), ("tf32", 2e-3), ("bf16", 2e-2)], ids=["fp32", "tf32", "bf16"]
)
def test_full_size_against_float64(precision: str, tolerance: float) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    tensors = [t.requires_grad_() for t in tensors_for(CHAIN_23, FULL, dtype, "cuda")]

    def check() -> None:
        run = ready(CHAIN_23, tensors, "tf32" if precision == "tf32" else "auto")
        dy = torch.zeros(FULL[0], dtype=dtype, device="cuda")
        few = [0, 63, 127]
        dy[few] = torch.randn(3, device="cuda").to(dtype)
        ours = torch.autograd.grad(run(tensors), tensors, dy)
        part = [t.detach().double() for t in (tensors[0][few], *tensors[1:])]
        part = [t.requires_grad_() for t in part]
        truth = torch.autograd.grad(reference.evaluate(CHAIN_23, part), part, dy[few].double())
        assert not ours[0][1:63].any()
        for found, true in zip((ours[0][few], *ours[1:]), truth, strict=True):
            assert float((found.double() - true).norm()) <= tolerance * float(true.norm())

    in_precision(precision, check)


@pytest.mark.parametrize("needs_input", [False, True])
def test_a_step_takes_no_memory_of_the_convolutions_size(needs_input: bool) -> None:
    tensors = [t.requires_grad_() for t in tensors_for(CHAIN_23, FULL, torch.float32, "cuda")]
    tensors[0].requires_grad_(needs_input)
    run = ready(CHAIN_23, tensors)
    leaves = [t for t in tensors if t.requires_grad]
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = torch.autograd.grad(run(tensors).sum(), leaves)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del found
    assert peak - (tensors[0].numel() * 4 if needs_input else 0) < 8 << 20
