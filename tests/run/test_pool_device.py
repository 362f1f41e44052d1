"""Pools behind chains on a real card, at sizes of real problems: by the rule, forward and in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import postlude
from cases import Builder, conv
from level2 import POOLED
from postlude import hardware, reference
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.run.execute import execute
from run.test_gpu_device import fused

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["contiguous", "channels_last"]
STEM = Builder(2, conv(2, (3, 32), 7, stride=2, padding=3, bias=False)).batch_norm().op("relu").pool("max", 3, 2, 1)
CHAINS: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "max 2-D": (Builder(2, conv(2, (16, 32))).norm(4).op("relu").pool("max", 2).op("tanh").chain(), (2, 16, 35, 66)),
    "avg 3-D": (Builder(3, conv(3, (8, 16))).norm(4).op("silu").pool("avg", 2).chain(), (2, 8, 13, 18, 19)),
    "windows of 3": (
        Builder(3).norm(4).op("mul", "channel").pool("max", 3).op("add", "channel").chain(),
        (2, 24, 16, 15, 14),
    ),
    "windows of 4": (
        Builder(2, conv(2, (8, 64))).norm(16).pool("max", 4).op("clamp", low=0.0, high=1.0).chain(),
        (4, 8, 34, 66),
    ),
    "small planes": (Builder(2, conv(2, (32, 64))).norm(8).op("relu").pool("avg", 2).chain(), (16, 32, 16, 16)),
    "in padding": (
        Builder(3).norm(4).op("relu").pool("avg", 3, 2, 1, ceil=True, counts_padding=False).chain(),
        (2, 24, 9, 14, 17),
    ),
    "stem": (STEM.chain(), (4, 3, 64, 64)),
    "no norm": (
        Builder(2, conv(2, (32, 64), padding=1)).op("hardswish").pool("max", 2).op("mish").chain(),
        (4, 32, 32, 32),
    ),
    "pool of pool": (Builder(3, conv(3, (8, 16))).pool("max", 2).pool("max", 3).chain(), (2, 8, 28, 27, 26)),
}


# Every chain forward in one way, and backward in two: both layouts and all dtypes take turns.
FORWARD = [(name, LAYOUTS[n % 2], DTYPES[n % 3]) for n, name in enumerate(CHAINS)]
BACKWARD = [(name, LAYOUTS[(n + m) % 2], DTYPES[(n + 2 * m) % 3]) for n, name in enumerate(CHAINS) for m in (0, 1)]


def trained(chain: Chain, tensors: list[torch.Tensor]) -> torch.Tensor:
    plan = lower(chain, problem_of(tensors), hardware.machine_for("cuda"), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    return execute(chain, plan, tensors)


@pytest.mark.parametrize(("name", "layout", "dtype"), FORWARD)
def test_is_right_by_the_rule(name: str, layout: str, dtype: torch.dtype) -> None:
    chain, shape = CHAINS[name]
    points = chain_points(chain, shape, dtype, "cuda", layout=layout)  # type: ignore[arg-type]
    verdict = verify_chain(fused, chain, points)
    assert verdict.right, verdict


@pytest.mark.parametrize(("name", "layout", "dtype"), BACKWARD)
def test_gradients_are_right_by_the_rule(name: str, layout: str, dtype: torch.dtype) -> None:
    chain, shape = CHAINS[name]
    points = chain_points(chain, shape, dtype, "cuda", layout=layout)  # type: ignore[arg-type]
    verdict = verify_chain(trained, chain, points, backward=True)
    assert verdict.right, (verdict, verdict.reasons)


@pytest.mark.parametrize("name", CHAINS)
def test_strides_are_pytorchs_and_bits_are_the_same_every_time(name: str) -> None:
    chain, shape = CHAINS[name]
    for layout in LAYOUTS:
        tensors = tensors_for(chain, shape, torch.float32, "cuda", 0, "normal", layout)  # type: ignore[arg-type]
        ours, theirs = fused(chain, tensors), reference.evaluate(chain, tensors)
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(ours, fused(chain, tensors))


def test_a_network_with_pools_is_optimized_and_trains() -> None:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
    x = torch.randn(32, 3, 128, 128, device="cuda")
    result = postlude.optimize(model, x)
    assert any("max_pool" in str(site.chain) for site in result.sites), result.sites
    model(x).square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("name", ["11", "35", "50", "65", "72", "74", "85"])
def test_level2_is_planned_and_right_at_a_smaller_batch(name: str) -> None:
    chain, (_, *rest) = POOLED[name]
    tensors = tensors_for(chain, (2, *rest), torch.float32, "cuda", 0, "normal", "contiguous")
    truth = reference.evaluate(chain, [t.double() for t in tensors])
    ours = fused(chain, tensors)
    scale = float(truth.std()) or 1.0
    assert float((ours.double() - truth).abs().max()) < 2e-2 * scale
