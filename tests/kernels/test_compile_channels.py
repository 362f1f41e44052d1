"""The pass that ends in a reduction over channels, compiled ahead of time for the cards we support."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cases import Builder, conv
from kernels import offline
from level2 import OVER_CHANNELS
from plan.test_convolve import card as machine_of
from plan.test_lower import problem
from postlude.chain import Chain
from postlude.plan import Plan, lower
from postlude.run.channels import ChannelsPass

pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]
card = offline.card
WIDE = Builder(2, conv(2, (16, 300))).norm(4).op("gelu", approximate="none").op("add", "full").op("mul", "row")
CHAINS = {**OVER_CHANNELS, "300 channels": (WIDE.reduce("amin", "channels").chain(), (8, 16, 64, 64))}


def compiled(chain: Chain, shape: tuple[int, ...], layout: str, dtype: str, card: int) -> Any:
    given = problem(chain, shape, layout, device="cuda")
    given = dataclasses.replace(given, tensors=tuple(dataclasses.replace(s, dtype=dtype) for s in given.tensors))
    plan = lower(chain, given, machine_of(card), even_if_slower=True, not_ours="not in this test")
    assert isinstance(plan, Plan), plan
    assert plan.value.layout == layout
    made = ChannelsPass(plan, 2).launch
    value, moments = (torch.empty(1, dtype=t, device="meta") for t in (getattr(torch, dtype), torch.float32))
    unread = [*[value] * 5, 99]  # where a step reads a number per sample and channel, the last place is a size
    operands = unread if "row" in chain.roles else [value] * 6
    pointers = (value, value, moments, moments, *operands)
    return made.kernel.warmup(*pointers, *made.numbers, **made.constants, num_warps=made.warps, grid=made.grid), made


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", CHAINS)
def test_compiles_within_each_cards_limits(name: str, layout: str, card: int) -> None:
    if card not in (80, 90) or (card == 80 and name == "79"):
        pytest.skip("compiled for sm_90, some for sm_80")
    made, launch = compiled(*CHAINS[name], layout, "float32" if card == 90 else "bfloat16", card)
    used = offline.resources(made.asm["ptx"], card)
    assert made.metadata.shared <= offline.CARDS[card]
    assert used.registers * 32 * launch.warps <= 65_536
    assert used.spilled == 0, used


def test_rows_are_read_in_vectors_and_each_channels_numbers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    made, launch = compiled(*OVER_CHANNELS["92"], "contiguous", "float32", 90)
    assert (launch.constants["BLOCK"], launch.constants["BLOCK_C"], launch.warps) == (64, 64, 4)
    ptx = made.asm["ptx"]
    assert ptx.count("ld.global.v4.b32") == 8  # 126² positions are a multiple of 4: 32 elements for each of 128 threads
    assert ptx.count("ld.global.b32") == 5 * 8  # bias, mean, rstd, weight and bias of 8 channels
