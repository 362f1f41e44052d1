"""The kernels of sums through their producer, compiled ahead of time for an H200."""

from __future__ import annotations

import re

import pytest

from cases import Builder, conv
from kernels import offline
from level2 import up
from plan.test_lower import problem
from plan.test_through import planned
from postlude.chain import Chain
from postlude.plan.through import Through
from postlude.run.ahead import program_of
from postlude.run.execute import prepare

pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]
SUMMED = Builder(0, conv(0, (8192, 8192), bias=False)).op("div", 2.0).reduce("sum", "sample").chain()
CHAINS: dict[str, tuple[Chain, tuple[int, ...], int]] = {  # and launches, forward and backward
    "14": (SUMMED, (1024, 8192), 3),
    "44": (Builder(2, up(2, (64, 128), 3, 1, 1)).op("mul", 0.5).reduce("mean", "space").chain(), (16, 64, 128, 128), 2),
    "98": (Builder(0, conv(0, (8192, 8192))).pool("avg", 16).chain(), (1024, 8192), 1),
    "3-D": (Builder(3, conv(3, (64, 128), padding=1)).reduce("mean", "space").chain(), (2, 64, 64, 64, 64), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_compiles_within_the_cards_limits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    chain, shape, launches = CHAINS[name]
    plan = planned(chain, shape, trains=True)
    assert isinstance(plan.own, Through)
    given = problem(chain, shape, device="cuda", needs_grad=True)
    program = program_of(chain, prepare(chain, plan), given, [True] * len(given.tensors))
    found = offline.compiled_calls((*program.forward, *program.backward), 90)
    assert len(found) == launches
    for one in found:
        used = offline.resources(one.ptx, 90)
        # A pass over memory needs many loads in flight: four programs of 4 warps per multiprocessor at least.
        assert used.registers * 32 * one.warps <= 65_536 // 4, (one.name, used)
        assert used.spilled == 0, (one.name, used)


@pytest.mark.parametrize("name", ["14", "44", "98"])
def test_rows_are_copied_in_vectors_while_others_are_added_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads into registers, which ptxas delays to save them, reached half of the bandwidth."""
    offline.use_card(monkeypatch, 90)
    chain, shape, _ = CHAINS[name]
    for one in offline.compiled_calls(planned(chain, shape).program.forward, 90):
        copies = re.findall(r"cp\.async\.cg\.shared\.global .*?, (0x[0-9a-f]+|\d+)", one.ptx)
        assert copies, one.name
        assert {int(size, 0) for size in copies} == {16}, one.name
