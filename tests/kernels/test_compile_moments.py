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
