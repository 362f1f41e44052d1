"""The backward passes on a real card: gradients by the rule in every precision, same bits, what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cases import CHAIN_23, CHAIN_61, Builder, conv
from postlude import hardware, reference
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.run.execute import Runner, prepare
from run.test_own_convolution_device import BLOCK, RESIDUAL, WIDE

pytestmark = pytest.mark.gpu
STRIDED = Builder(3, conv(3, (16, 24), stride=2)).op("gelu", approximate="none").norm(4).chain()
SMALL: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "61": (CHAIN_61, (2, 64, 9, 10, 11)),
    "23": (CHAIN_23, (6, 3, 15, 13, 37)),
    "block": (BLOCK, (2, 32, 13, 12, 17)),
    "residual": (RESIDUAL, (2, 16, 9, 8, 7)),
    "many channels": (WIDE, (2, 16, 8, 9, 7)),
    "strided": (STRIDED, (2, 16, 13, 12, 11)),
}


def ready(chain: Chain, tensors: Sequence[Tensor], memory: str = "default") -> Runner:
    problem = dataclasses.replace(problem_of(tensors, memory=memory), needs_grad=True)
    plan = lower_for_gpu(chain, problem, hardware.machine_for("cuda"), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    return prepare(chain, plan, "cuda")


def fused(memory: str) -> Callable[[Chain, Sequence[Tensor]], Tensor]:
    return lambda chain, tensors: ready(chain, tensors, memory)(tensors)


@pytest.mark.parametrize("memory", ["default", "lean"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_right_by_the_rule(name: str, precision: str, memory: str) -> None:
    chain, shape = SMALL[name]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    switch = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = switch.fp32_precision
    try:
        switch.fp32_precision = "tf32" if precision == "tf32" else "ieee"  # training follows PyTorch's switch
        points = chain_points(chain, shape, dtype, "cuda")
        verdict = verify_chain(fused(memory), chain, points, "auto", backward=True)
    finally:
        switch.fp32_precision = before
    assert verdict.right, verdict


def gradients(run: Runner, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    y = run(tensors)
    return torch.autograd.grad(y, list(tensors), torch.ones_like(y))


@pytest.mark.parametrize("name", SMALL)
def test_same_bits_every_time(name: str) -> None:
    chain, shape = SMALL[name]
    tensors = [t.requires_grad_() for t in tensors_for(chain, shape, torch.float32, "cuda")]
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        run = ready(chain, tensors)
        for one, other in zip(gradients(run, tensors), gradients(run, tensors), strict=True):
            assert torch.equal(one, other)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(("name", "shape"), [("61", (16, 64, 32, 32, 32)), ("23", (128, 3, 24, 32, 32))])
def test_a_step_takes_less_memory_than_eagers(name: str, shape: tuple[int, ...]) -> None:
    chain = SMALL[name][0]
    tensors = [t.requires_grad_() for t in tensors_for(chain, shape, torch.float32, "cuda")]

    def peak(run: Callable[[Sequence[Tensor]], Tensor]) -> int:
        gradients(run, tensors)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients(run, tensors)
        return torch.cuda.max_memory_allocated() - before

    theirs = peak(lambda ts: reference.evaluate(chain, ts))
    for memory in ("default", "lean"):
        assert peak(ready(chain, tensors, memory)) < theirs, memory
