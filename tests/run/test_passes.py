"""The passes over values of short and long rows by Triton's interpreter, in the tiles of plans, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import Builder, Case
from postlude import reference
from postlude.check import tensors_for
from postlude.stages.cuts import Cut, last_cut, moments_cut, tile_of
from run.test_gpu import fused
from run.test_gradient import compared, plan_for
from wrong_kernels import replace_text

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("poisoned_memory")]
CHAIN = Builder(2).op("mul", "row").norm(3).op("tanh").op("add", "full").chain()
SPACES = {1: (1, 1), 7: (1, 7), 225: (15, 15), 900: (30, 30), 1024: (32, 32), 4097: (17, 241)}
LAYOUTS = ("contiguous", "channels_last")


def shape_of(positions: int) -> tuple[int, ...]:
    return (2, 6, *SPACES[positions])  # six rows: they fill no tile


def error(positions: int, layout: Any) -> float:
    tensors = tensors_for(CHAIN, shape_of(positions), torch.float32, layout=layout)
    truth = reference.evaluate(CHAIN, tensors, dtype=torch.float64)
    off = (fused(CHAIN, list(tensors), small_tiles=False).double() - truth).abs().max() / truth.abs().max()
    return float(torch.nan_to_num(off, nan=torch.inf))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("positions", SPACES)
def test_rows_of_every_length(positions: int, layout: str) -> None:
    assert error(positions, layout) < 2e-6


@pytest.mark.parametrize(("positions", "layout"), [(s, LAYOUTS[0]) for s in (1, 7, 225, 900)] + [(225, LAYOUTS[1])])
def test_their_gradients(positions: int, layout: str) -> None:
    assert compared(Case("short", CHAIN, shape_of(positions)), torch.float64, layout) < 1e-10


def cuts(positions: int) -> tuple[Cut, Cut]:
    tensors = tensors_for(CHAIN, shape_of(positions), torch.float32)
    plan = plan_for(CHAIN, tensors, small_tiles=False)
    return last_cut(plan.value, tile_of(plan)), moments_cut(plan.value, tile_of(plan))


def test_these_lengths_run_both_ways() -> None:
    assert [tuple(cut.is_short for cut in cuts(positions)) for positions in SPACES] == [(True, True)] * 5 + [
        (False,) * 2
    ]
    assert [cut.chunks(4097) for cut in cuts(4097)] == [5, 5]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("o_c[None, :]) * S + o_s", "o_c[None, :]) * (S - 1) + o_s"),  # rows that overlap
        ("o_c = tl.program_id(1) * BLOCK_C + ", "o_c = "),  # the first rows again and again
    ],
)
def test_wrong_places_are_seen_to_fail(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_text(monkeypatch, "tiles", right, wrong)
    assert error(225, "contiguous") > 1e-3
