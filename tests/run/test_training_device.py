"""The backward passes on a real card: gradients by the rule in every precision, same bits, what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from cases import CHAIN_23, CHAIN_61, Builder, conv
from level2 import up
from postlude import hardware, reference
from postlude.chain import Chain, Value
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.nn import FusedChain
from postlude.plan import Plan, lower, problem_of
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
    "layer_norm": (Builder(2, conv(2, (32, 48), padding=1)).layer_norm().op("silu").chain(), (2, 32, 13, 11)),
    "no norm": (
        Builder(2, conv(2, (24, 40), padding=1)).op("gelu", approximate="none").op("mul", "channel").op("relu").chain(),
        (3, 24, 31, 29),
    ),
    "no norm, 32 channels": (
        Builder(3, conv(3, (32, 32), padding=1)).op("sigmoid").op("mul", Value(0)).op("add", "full").chain(),
        (2, 32, 9, 8, 32),
    ),
    "no norm, 8 channels": (Builder(2, conv(2, (8, 40))).op("silu").op("mul", 2.0).chain(), (3, 8, 31, 29)),
    "no norm, transposed": (
        Builder(3, conv(3, (32, 48), transposed=True)).op("hardswish").op("add", 1.0).chain(),
        (2, 32, 7, 6, 5),
    ),
    "no norm, phases": (Builder(2, up(2, (48, 72), 4)).op("mish").op("add", "full").chain(), (3, 48, 13, 17)),
    "from its result": (
        Builder(2, conv(2, (24, 40), padding=1)).op("add", "full").op("relu").chain(),
        (3, 24, 31, 29),
    ),
    "5 taps": (Builder(3, conv(3, (24, 40), 5, padding=2)).norm(4).op("silu").chain(), (2, 24, 9, 8, 10)),
    "4 taps, 3 channels": (
        Builder(3, conv(3, (3, 16), 4)).op("hardswish").norm(4).reduce("mean", "space").chain(),
        (3, 3, 9, 10, 12),
    ),
    "moments": (Builder(3, conv(3, (16, 24), 5)).norm(4).reduce("mean", "space").chain(), (3, 16, 9, 8, 12)),
    "phases": (Builder(3, up(3, (16, 24))).op("silu").norm(4).op("relu").chain(), (2, 16, 7, 6, 5)),
    "phases, dense cells": (Builder(3, up(3, (64, 128), 3, 1, 0)).op("silu").chain(), (2, 64, 5, 6, 7)),
    "phases, k2": (Builder(2, up(2, (64, 24), 2, 0, 1)).norm(None).chain(), (3, 64, 13, 11)),
    "phases, k5": (Builder(2, up(2, (20, 130), 5, 2, 0)).op("tanh").chain(), (3, 20, 13, 11)),
    "phases, 3 channels": (Builder(3, up(3, (3, 16), 3, 1, 0)).op("silu").norm(4).chain(), (3, 3, 9, 8, 7)),
    "phases, stride 3": (
        Builder(2, conv(2, (32, 64), 5, transposed=True, stride=3, padding=1, output_padding=2)).op("mish").chain(),
        (2, 32, 19, 17),
    ),
    "phases, layer_norm": (Builder(3, up(3, (32, 40))).layer_norm().op("silu").chain(), (2, 32, 5, 6, 7)),
}
WITH_STRIDES: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "64→64": (Builder(2, up(2, (64, 64))).op("tanh").chain(), (8, 64, 128, 128)),
    "64→128": (Builder(3, up(3, (64, 128), 3, 1, 0)).op("tanh").chain(), (2, 64, 24, 48, 48)),
    "32→64, down": (Builder(3, conv(3, (32, 64), stride=2, padding=1)).op("tanh").chain(), (4, 32, 64, 64, 64)),
}


def ready(chain: Chain, tensors: Sequence[Tensor], memory: str = "default") -> Runner:
    problem = dataclasses.replace(problem_of(tensors, memory=memory), needs_grad=True)
    plan = lower(chain, problem, hardware.machine_for("cuda"), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    return prepare(chain, plan)


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


OF_MANY: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "group_norm": (Builder(2).norm(8).chain(), (512, 128, 17, 17)),
    "layer_norm": (Builder(2).layer_norm().chain(), (4096, 16, 15, 15)),
    "softmax over channels": (
        Builder(3, up(3, (32, 64), 3)).softmax().op("sigmoid").chain(),
        (4, 32, 16, 32, 32),
    ),
}


@pytest.mark.parametrize("name", OF_MANY)
def test_sums_over_many_values_collect_no_bias(name: str) -> None:
    """A division that errs to one side, by 0.1 ulp of each value, is many ulp of a sum over 100,000 of them."""
    chain, shape = OF_MANY[name]
    verdict = verify_chain(fused("default"), chain, chain_points(chain, shape, torch.float32, "cuda"), backward=True)
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


@pytest.mark.parametrize("name", WITH_STRIDES)
def test_gradients_with_strides_are_as_exact_as_pytorchs(name: str) -> None:
    """At KernelBench's sizes with fewer samples, and of a U-Net: against float64, beside strict PyTorch."""
    chain, shape = WITH_STRIDES[name]
    tensors = tensors_for(chain, shape, torch.float32, "cuda", 3, "normal")
    exact = [t.double().requires_grad_() for t in tensors]
    truth = gradients(lambda ts: reference.evaluate(chain, ts), exact)
    switch = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = switch.fp32_precision
    try:
        switch.fp32_precision = "ieee"
        given = [t.requires_grad_() for t in tensors]
        plan = lower(chain, problem_of(given), hardware.machine_for("cuda"))
        assert isinstance(plan, Plan), plan
        assert plan.gradients.of_weight is not None
        ours = gradients(prepare(chain, plan), given)
        theirs = gradients(lambda ts: reference.evaluate(chain, ts), given)
    finally:
        switch.fp32_precision = before
    for mine, their, right in zip(ours, theirs, truth, strict=True):
        ulp = torch.finfo(torch.float32).eps * float(right.abs().max())
        error, own = (float((t.double() - right).square().mean().sqrt()) for t in (mine, their))
        assert error <= 2 * own + ulp


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


def block(kind: type[nn.Sequential]) -> nn.Sequential:
    torch.manual_seed(0)
    modules = (nn.Conv3d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.LeakyReLU(0.01))
    return kind(*modules).cuda()


def test_amp_with_a_grad_scaler_trains_as_eager_does() -> None:
    x = torch.randn(2, 32, 64, 64, 64, device="cuda")
    results = []
    for kind in (nn.Sequential, FusedChain):
        model = block(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).float().square().mean()
            if step == 2:
                loss = loss * float("inf")  # a step that the scaler must skip
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((scaler.get_scale(), {name: p.detach().clone() for name, p in model.named_parameters()}))
        if isinstance(model, FusedChain):
            site, *_ = next(iter(model._read.values()))
            outcome = site.ledger.latest[site.name, site.chain].outcome
            assert isinstance(outcome, Plan)
            assert outcome.trains
    (their_scale, theirs), (our_scale, ours) = results
    assert our_scale == their_scale == 2.0**11
    for name, true in theirs.items():
        torch.testing.assert_close(ours[name], true, rtol=2e-3, atol=2e-4)


def test_compiled_without_a_break_a_step_gives_the_same() -> None:
    fused = block(FusedChain)
    x = torch.randn(2, 32, 64, 64, 64, device="cuda", requires_grad=True)
    wanted = [x, *fused.parameters()]
    dy = torch.randn_like(x)
    eager = torch.autograd.grad(fused(x), wanted, dy)
    compiled = torch.autograd.grad(torch.compile(fused, fullgraph=True)(x), wanted, dy)
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(one.abs().max()) + 1e-6)
