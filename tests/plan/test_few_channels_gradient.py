"""Tiles of the gradients of a convolution of few channels: they fit, and together give everything once."""

from __future__ import annotations

import dataclasses

import pytest

from cases import CHAIN_23, Builder, conv
from plan.test_convolve import card
from plan.test_lower import problem
from postlude.plan import Plan
from postlude.plan.few_channels import FewChannels, Geometry
from postlude.plan.few_channels_gradient import (
    FewChannelsGradient,
    GradientPlan,
    few_channels_gradient_for,
    gradient_shared_bytes,
)
from postlude.plan.gpu import lower_for_gpu

OWN = FewChannels("float16", 2, 11, 10)


@pytest.mark.parametrize("space", [(24, 32, 32), (7, 9, 100), (3, 3, 3), (130, 130, 130)])
@pytest.mark.parametrize("planes", [1, 2])
def test_tiles_fit_the_shared_memory(space: tuple[int, int, int], planes: int) -> None:
    own = dataclasses.replace(OWN, planes=planes)
    found = few_channels_gradient_for(own, CHAIN_23, problem(CHAIN_23, (2, 3, *space), device="cuda"), card(90))
    assert isinstance(found, GradientPlan)
    shape = Geometry(3, 24, (3, 3, 3), (0, 0, 0), False, "float32")
    for settings, with_input in ((found.weight, False), (found.both, True)):
        assert settings.planes == planes
        assert (gradient_shared_bytes(settings, shape, with_input) + 1024) * settings.blocks <= 233_472
        assert settings.height % settings.rows == 0
        assert settings.depth >= 3


def test_chain_23_is_cut_in_two_and_its_depth_is_not() -> None:
    given = problem(CHAIN_23, (128, 3, 24, 32, 32), device="cuda")
    found = few_channels_gradient_for(OWN, CHAIN_23, given, dataclasses.replace(card(90), threads=132))
    assert found is not None
    shape = Geometry(3, 24, (3, 3, 3), (0, 0, 0), False, "float32")
    assert found.both.tiles_along(shape, (24, 32, 32), True) == (1, 2, 1)
    assert found.weight.tiles_along(shape, (24, 32, 32), False) == (1, 2, 1)


def test_a_single_large_sample_is_cut_in_depth_too() -> None:
    given = problem(CHAIN_23, (1, 3, 130, 64, 64), device="cuda")
    found = few_channels_gradient_for(OWN, CHAIN_23, given, dataclasses.replace(card(90), threads=132))
    assert found is not None
    shape = Geometry(3, 24, (3, 3, 3), (0, 0, 0), False, "float32")
    deep, high, wide = found.both.tiles_along(shape, (130, 64, 64), True)
    assert deep > 4
    assert deep * high * wide >= 100


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("tile", [4, 16])
def test_tiles_cover_every_position_and_output_once(taps: int, tile: int) -> None:
    """The kernel's own arithmetic: what a tile counts and what it returns along the second axis."""
    settings = FewChannelsGradient("float16", 2, 8, tile)
    for size in range(taps, 60):
        for padding in range(taps):
            shape = Geometry(3, 8, (1, taps, 1), (0, padding, 0), False, "float32")
            out = shape.output((1, size, 1))[1]
            tiles = settings.tiles_along(shape, (1, size, 1), True)[1]
            counted, given = [], []
            for i in range(tiles):
                first, reach = i * (tile - taps + 1), taps - 1 if i else 0
                low = first + reach - padding if i else 0
                high = size if i == tiles - 1 else first + tile - padding
                assert high - low <= tile
                counted += range(first + reach, min(first + tile, out))
                given += range(low, high)
            assert counted == list(range(out))
            assert given == list(range(size))


def test_other_cards_and_many_channels_keep_the_slabs() -> None:
    given = problem(CHAIN_23, (128, 3, 24, 32, 32), device="cuda")
    assert few_channels_gradient_for(OWN, CHAIN_23, given, card(80)) is None
    wide = Builder(3, conv(3, (3, 40))).norm(8).reduce("mean", "sample").chain()
    assert few_channels_gradient_for(OWN, wide, problem(wide, (2, 3, 24, 32, 32), device="cuda"), card(90)) is None


@pytest.mark.parametrize("trains", [False, True])
def test_only_training_plans_it(trains: bool) -> None:
    given = problem(CHAIN_23, (128, 3, 24, 32, 32), device="cuda", needs_grad=trains)
    found = lower_for_gpu(CHAIN_23, given, card(90))
    assert isinstance(found, Plan)
    assert isinstance(found.own, FewChannels)
    assert (found.gradients.of_both is not None) == trains
