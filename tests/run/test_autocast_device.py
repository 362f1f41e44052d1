"""Every path on a real card as mixed precision uses it: float32 parameters under autocast, and 16-bit models.

Forward and training, both 16-bit dtypes, both layouts, judged against float64 by the rule in check/.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import postlude
from autocasting import PARAMETERS, autocasted
from cases import Builder, conv
from level2 import up
from postlude import hardware
from postlude.chain import Chain
from postlude.check import ChainPoint, chain_points, verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.plan.boxes import Boxes
from postlude.plan.few_channels import FewChannels
from postlude.plan.gemm import Gemm
from postlude.run.execute import prepare

pytestmark = pytest.mark.gpu
SEEDS = 2
# name → chain, input, who convolves on Hopper
PATHS: dict[str, tuple[Chain, tuple[int, ...], type | None]] = {
    "packed": (Builder(3, conv(3, (144, 32), padding=1)).norm(8).op("silu").chain(), (2, 144, 9, 8, 11), Gemm),
    "packed, no norm": (
        Builder(2, conv(2, (24, 40), padding=1)).op("gelu", approximate="none").op("mul", "channel").chain(),
        (3, 24, 31, 29),
        Gemm,
    ),
    "boxes": (
        Builder(3, conv(3, (32, 32), padding=1)).norm(None).op("prelu", "channel").chain(),
        (2, 32, 8, 16, 32),
        Boxes,
    ),
    "boxes, residual": (
        Builder(3, conv(3, (64, 64), padding=1)).norm(8).op("add", "full").op("relu").chain(),
        (2, 64, 8, 16, 32),
        Boxes,
    ),
    "phases": (Builder(3, up(3, (32, 40))).op("silu").norm(4).op("relu").chain(), (2, 32, 5, 6, 7), Gemm),
    "few channels": (
        Builder(3, conv(3, (3, 24))).norm(8).reduce("mean", "sample").chain(),
        (6, 3, 15, 13, 37),
        None,  # ours of few channels in a 16-bit model; under autocast the cast before the norm makes it a product
    ),
    "few channels, batch_norm": (
        Builder(3, conv(3, (3, 24))).batch_norm().reduce("mean", "space").chain(),
        (6, 3, 15, 13, 37),
        FewChannels,
    ),
    "unfolded": (Builder(2, conv(2, (3, 16))).op("mul", "channel").op("silu").chain(), (3, 3, 31, 30), Gemm),
    "rows": (Builder(2, conv(2, (32, 48), padding=1)).layer_norm().op("silu").chain(), (2, 32, 13, 11), None),
    "over channels": (
        Builder(2, conv(2, (24, 40))).norm(8).op("mul", 3.0).op("hardswish").reduce("logsumexp", "channels").chain(),
        (3, 24, 31, 29),
        None,  # scaled: the sum over so many normalised channels is nearly constant in bfloat16
    ),
    "library": (
        Builder(3, conv(3, (16, 24), stride=2)).op("softplus", beta=1.0, threshold=20.0).norm(4).chain(),
        (2, 16, 13, 12, 11),
        None,
    ),
    "moments": (Builder(3, conv(3, (16, 24), 5)).norm(4).reduce("mean", "space").chain(), (3, 16, 9, 8, 12), None),
    "batch_norm": (Builder(2, conv(2, (24, 40))).batch_norm().op("relu").chain(), (3, 24, 31, 29), None),
}
KINDS = {
    "fp16 autocast": (torch.float16, True),
    "bf16 autocast": (torch.bfloat16, True),
    "fp16 model": (torch.float16, False),
    "bf16 model": (torch.bfloat16, False),
}


def points_of(name: str, kind: str, layout: str) -> list[ChainPoint]:
    """Under autocast the parameters are float32 numbers, which no 16-bit ones equal."""
    chain, shape, _ = PATHS[name]
    dtype, is_autocast = KINDS[kind]
    points = chain_points(chain, shape, dtype, "cuda", SEEDS, layout)  # type: ignore[arg-type]
    if not is_autocast:
        return [*points]
    wide = chain_points(chain, shape, torch.float32, "cuda", SEEDS, layout)  # type: ignore[arg-type]
    return [
        ChainPoint(
            tuple(w if role in PARAMETERS else t for t, w, role in zip(half.tensors, full.tensors, chain.roles)),
            half.family,
        )
        for half, full in zip(points, wide, strict=True)
    ]


def chain_of(name: str, kind: str, tensors: Sequence[Tensor]) -> Chain:
    dtype, is_autocast = KINDS[kind]
    found = autocasted(PATHS[name][0], tensors, "cuda", dtype) if is_autocast else PATHS[name][0]
    assert isinstance(found, Chain), found
    return found


def fused(name: str, trains: bool) -> Callable[[Chain, Sequence[Tensor]], Tensor]:
    machine, expected = hardware.machine_for("cuda"), PATHS[name][2]

    def run(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        problem = problem_of(tensors)
        plan = lower(chain, problem, machine, even_if_slower=True)
        assert isinstance(plan, Plan), plan
        assert plan.trains == problem.needs_grad
        assert trains or not plan.trains
        if expected is not None and machine.card.architecture == "sm_90":
            assert isinstance(plan.own, expected)
        return prepare(chain, plan)(tensors)

    return run


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("trains", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PATHS)
def test_is_right_by_the_rule(name: str, kind: str, trains: bool, layout: str) -> None:
    points = points_of(name, kind, layout)
    verdict = verify_chain(fused(name, trains), chain_of(name, kind, points[0].tensors), points, backward=trains)
    assert verdict.right, verdict


def _network(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Blocks that people train under autocast: instance_norm hands 16 bits on to the next one, group_norm float32."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((4, 32), (32, 32), (32, 32)):
        layers += [nn.Conv3d(before, after, 3, padding=1), norm(after), nn.PReLU(after)]
    return nn.Sequential(*layers, nn.ConvTranspose3d(32, 16, 2, stride=2), norm(16), nn.LeakyReLU(0.01)).cuda()


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "instance_norm": lambda channels: nn.InstanceNorm3d(channels, affine=True),
    "group_norm": lambda channels: nn.GroupNorm(4, channels),
}


def _step(model: nn.Module, x: Tensor, dtype: torch.dtype | None, backward_inside: bool) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", dtype=dtype or torch.float16, enabled=dtype is not None):
        y = model(x)
        if backward_inside:
            y.float().square().mean().backward()
    if not backward_inside:
        y.float().square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_trains_and_then_evaluates(norm: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    """After `eval()` there is a new graph; eager's distance from float32 is the measure."""
    model = _network(NORMS[norm]).to(memory_format=layout)
    plain = copy.deepcopy(model)
    x = (torch.randn(2, 4, 64, 64, 64, device="cuda") + 0.3).to(memory_format=layout)
    with torch.autocast("cuda", dtype=dtype):
        result = postlude.optimize(model, x)
    assert result.verdict is not None
    assert result.verdict.right, result.verdict
    assert any(site.is_fused for site in result.sites)
    exact = _step(plain, x, None, False)
    for inside in (False, True):
        ours, eager = _step(model, x, dtype, inside), _step(plain, x, dtype, inside)
        _assert_as_near(ours, eager, exact, dtype)
    with torch.no_grad():
        true = plain.eval()(x)
        with torch.autocast("cuda", dtype=dtype):
            _assert_as_near([model.eval()(x)], [plain(x)], [true], dtype)


def _assert_as_near(ours: list[Tensor], eager: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> None:
    """Twice eager's own error, and a rounding: a gradient of one element may be near the truth by chance."""
    for one, theirs, true in zip(ours, eager, exact, strict=True):
        assert (one.dtype, one.shape) == (theirs.dtype, theirs.shape)
        error, own = (float((t.double() - true.double()).norm()) for t in (one, theirs))
        assert error <= 2 * own + torch.finfo(dtype).eps * float(true.double().norm())
