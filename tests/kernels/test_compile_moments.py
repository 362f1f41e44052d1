"""The kernel that ends chains on their moments, compiled ahead of time for the cards we support."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import Builder, conv
from kernels import offline
from postlude.chain import Chain, Reduce
from postlude.plan.program import moments_only
from postlude.run import finish_moments

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


def compiled(chain: Chain, channels: int, dtype: torch.dtype) -> Any:
    from postlude.kernels.triton.moments import finish_moments_kernel

    need = moments_only(chain)
    assert need is not None
    reduce = chain.steps[need.reduce - 1]
    assert isinstance(reduce, Reduce)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    block_c, block = finish_moments.blocks(channels)
    return finish_moments_kernel.warmup(
        *(acc, acc, acc, dtype),
        *[dtype] * 6,
        99,
        C=channels,
        MOMENTS=finish_moments.moments_program(chain, need.before + 1, need.reduce),
        SQUARES=need.squares,
        OVER_SPACE=reduce.over == "space",
        BLOCK_C=block_c,
        BLOCK=block,
        num_warps=finish_moments.WARPS,
        grid=(1,),
    )


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
    from postlude.kernels.triton import moments_gradient as kernels
    from postlude.plan.problem import power_of_two
    from postlude.run.moments_gradient import TILE

    per = power_of_two(channels // groups)
    acc, dtype, table = torch.float64, torch.bfloat16, torch.float32
    gradient = kernels.moments_gradient_kernel.warmup(
        *(acc, acc, dtype, dtype, dtype, table, dtype, dtype, dtype, 128, 19800),
        C=channels,
        PER=channels // groups,
        EPS=1e-5,
        OVER_SPACE=False,
        IS_SUM=False,
        HAS_GAMMA=True,
        HAS_BETA=True,
        HAS_BIAS=True,
        BLOCK_P=per,
        BLOCK_N=min(128, TILE // per),
        num_warps=4,
        grid=(1,),
    )
    block_c, block = finish_moments.blocks(channels)
    combined = kernels.combined_moments_kernel.warmup(
        *(table, table, table, acc, 128, 99), C=channels, BLOCK_C=block_c, BLOCK=block, num_warps=8, grid=(1,)
    )
    for found in (gradient, combined):
        assert found.metadata.shared <= offline.CARDS[card]
        assert offline.resources(found.asm["ptx"], card).spilled == 0
