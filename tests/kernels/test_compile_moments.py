"""The kernel that ends chains on their moments, compiled ahead of time for the cards we support."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from kernels import offline
from machines import H200
from postlude.chain import Chain
from postlude.plan import Plan, Problem, lower
from postlude.plan.barriers import moments_only
from postlude.plan.problem import Spec
from postlude.run.ahead import program_of
from postlude.run.execute import prepare
from postlude.stages.cuts import Partials
from postlude.stages.moments import finish_moments
from tracing import compiled as compiled_call
from tracing import kernel_calls, traced_calls

pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]
card = offline.card

CHAINS = {
    "norm mean": Builder(3, conv(3, (3, 24))).norm(8).reduce("mean", "sample").chain(),
    "sum over space": Builder(3).reduce("sum", "space").chain(),
    "two norms": Builder(2)
    .norm(5)
    .op("mul", "channel")
    .op("add", 0.1)
    .norm(None)
    .reduce("mean", "space", True)
    .chain(),
}
CHANNELS = {"norm mean": 24, "sum over space": 1, "two norms": 255}
BATCH, CHUNKS = 4, 99


def compiled(chain: Chain, channels: int, dtype: torch.dtype) -> Any:
    need = moments_only(chain)
    assert need is not None
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    value = Spec((BATCH, channels, *[30] * chain.dims), str(dtype).removeprefix("torch."), "contiguous")

    def stage(means: Tensor, squares: Tensor, counts: Tensor, *tensors: Tensor) -> Tensor:
        partials = Partials(means, squares, counts)
        return finish_moments(chain, need.before + 1, need.squares, value, dtype, partials, tensors)

    part = torch.empty((BATCH, channels, CHUNKS), dtype=acc, device="meta")
    tensors = [torch.empty(channels, dtype=dtype, device="meta") for _ in chain.roles]
    (call,) = kernel_calls(traced_calls(stage, part, part, part[:, 0], *tensors))
    assert (call.kernel, call.numbers) == ("finish_moments_kernel", (("CHUNKS", CHUNKS),))
    return compiled_call(call)[1]


@pytest.mark.parametrize("name", list(CHAINS))
def test_compiles_within_each_cards_limits(card: int, name: str) -> None:
    few = (torch.bfloat16,)  # the one whose conversions differ between cards
    for dtype in (*few, torch.float16, torch.float32, torch.float64) if card == 90 else few:
        found = compiled(CHAINS[name], CHANNELS[name], dtype)
        assert found.metadata.target.arch == card
        assert found.metadata.shared <= offline.CARDS[card]
        assert offline.resources(found.asm["ptx"], card).spilled == 0, (name, dtype)


def test_numbers_of_the_chain_stay_double(card: int) -> None:
    if card == 90:
        assert "dense<1.000000e-01> : tensor<256xf64>" in compiled(CHAINS["two norms"], 255, torch.float32).asm["ttir"]


@pytest.mark.parametrize("card", [90], indirect=True)
@pytest.mark.parametrize(("channels", "groups"), [(24, 8), (32, 1), (30, 30)])
def test_the_backward_pass_compiles_within_hoppers_limits(card: int, channels: int, groups: int) -> None:
    chain = Builder(3, conv(3, (3, channels))).norm(groups).reduce("mean", "sample").chain()
    shapes = [(128, 3, 24, 32, 32), (channels, 3, 3, 3, 3), *[(channels,)] * 3]
    problem = Problem(tuple(Spec(shape, "bfloat16", "contiguous") for shape in shapes), "cuda", "auto", True)
    plan = lower(chain, problem, H200, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    program = program_of(chain, prepare(chain, plan), problem, [True] * len(shapes))
    (combined,) = (call for call in kernel_calls(program.forward) if call.kernel == "combined_moments_kernel")
    (gradient,) = kernel_calls(program.backward)
    assert gradient.kernel == "moments_gradient_kernel"
    for found in offline.compiled_calls([combined, gradient], card):
        assert found.shared <= offline.CARDS[card]
        assert offline.resources(found.ptx, card).spilled == 0
