"""Which tile a pass gets: shipped, by rule or the user's own, and what may be tried in its place."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from cases import CHAIN_23, CHAIN_61, Builder, conv
from kernels.offline import CARDS
from machines import card, with_shared_bytes
from plan.test_lower import problem
from postlude.card_tiles import BY_RULE_80, MEASURED, RULE
from postlude.chain import Chain
from postlude.hardware import Machine
from postlude.plan import Plan, Problem, lower
from postlude.plan.boxes import Boxes
from postlude.plan.candidates import MOST, candidates, with_row
from postlude.plan.convolve import gradient_products, product_for
from postlude.plan.few_channels import FewChannels
from postlude.plan.gemm import Arithmetic, Gemm
from postlude.plan.tile_uses import uses_of
from postlude.plan.tiles import product_uses, row_for
from postlude.plan.weight_gradient import weight_gemm_for
from postlude.tile_table import SETTINGS, Row, TileUse

ONE, TWO = Arithmetic("float16", 1, scaled=True), Arithmetic("float16", 2, scaled=True)
DILATED = Builder(3, conv(3, (32, 32), dilation=2)).op("relu").norm(8).chain()
SHAPES = {CHAIN_61: (16, 64, 32, 32, 32), CHAIN_23: (128, 3, 24, 32, 32), DILATED: (8, 32, 96, 96, 96)}
CONV = conv(3, (64, 128))


def asked(chain: Chain, needs_grad: bool = False) -> Problem:
    given = problem(chain, SHAPES[chain], device="cuda", precision="fp32")
    return dataclasses.replace(given, needs_grad=needs_grad)


def tuned(machine: Machine, use: TileUse, **settings: int) -> Machine:
    return with_row(machine, Row(use, tuple(settings.items()), tuned="2026-01-02T03:04:05+00:00"))


@pytest.mark.parametrize(
    ("architecture", "arithmetic", "tile", "origin"),
    [
        (90, ONE, (128, 3, 4), MEASURED),
        (90, TWO, (128, 3, 8), MEASURED),
        (80, ONE, (128, 3, 8), BY_RULE_80),
        (80, TWO, (64, 2, 8), BY_RULE_80),
        (89, ONE, (128, 3, 8), RULE),
        (120, TWO, (64, 2, 8), RULE),
    ],
)
def test_shipped_products(architecture: int, arithmetic: Arithmetic, tile: tuple[int, ...], origin: str) -> None:
    machine = card(architecture)
    made = product_for(CONV, (32, 32, 32), arithmetic, machine)
    assert (made.rows, made.stages, made.warps) == tile
    assert str(row_for(machine, *product_uses("product", CONV, arithmetic, machine))) == origin


def test_the_users_own_tile_comes_first_and_only_for_its_question() -> None:
    (use,) = product_uses("product", CONV, TWO, card(90))
    machine = tuned(card(90), use, rows=64, stages=4, warps=8)
    assert product_for(CONV, (32, 32, 32), TWO, machine).stages == 4
    assert product_for(conv(3, (33, 65)), (32, 32, 32), TWO, machine).stages == 4  # the same powers of two
    assert product_for(conv(3, (32, 128)), (32, 32, 32), TWO, machine).stages == 3
    assert product_for(CONV, (32, 32, 32), ONE, machine).stages == 3


def test_a_tile_that_does_not_fit_is_passed_over() -> None:
    """It was measured with fewer channels of the same power of two, or fewer taps."""
    (use,) = product_uses("product", CONV, TWO, card(90))
    machine = tuned(card(90), use, rows=256, stages=4, warps=8)
    assert product_for(CONV, (32, 32, 32), TWO, machine) == product_for(CONV, (32, 32, 32), TWO, card(90))
    (use,) = product_uses("weight's gradient", CONV, TWO, card(90))
    machine = with_shared_bytes(tuned(card(90), use, stages=4, warps=8, programs=4), 120_000)
    assert weight_gemm_for(CONV, (32, 32, 32), TWO, machine) == weight_gemm_for(CONV, (32, 32, 32), TWO, card(90))
    machine = tuned(card(90), use, stages=2, warps=4, programs=4)
    made = weight_gemm_for(CONV, (32, 32, 32), TWO, machine)
    assert (made.stages, made.warps) == (2, 4)
    assert made.splits > weight_gemm_for(CONV, (32, 32, 32), TWO, card(90)).splits


@pytest.mark.parametrize(("cin", "cout"), [*itertools.product((16, 40, 48, 64), (16, 24, 32, 48, 64, 128))])
@pytest.mark.parametrize("arithmetic", [ONE, TWO], ids=str)
def test_steps_of_a_product_divide_what_it_sums_over(cin: int, cout: int, arithmetic: Arithmetic) -> None:
    """With the width that a tile of the input's gradient names: else nothing, or too little, would be summed."""
    given = problem(CHAIN_61, SHAPES[CHAIN_61], device="cuda", precision="fp32")
    how = conv(3, (cin, cout), padding=1)
    own = product_for(how, (32, 32, 32), arithmetic, card(90))
    back, _ = gradient_products(Builder(3, how).norm(None).chain(), given, own, card(90))
    assert back is not None
    for made in (own, back):
        assert made.volume.span * made.channels % made.block_k == 0


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("chain", SHAPES, ids=str)
def test_every_question_of_a_plan_has_an_origin_and_some_candidates(chain: Chain, needs_grad: bool) -> None:
    machine, given = card(90), asked(chain, needs_grad)
    plan = lower(chain, given, machine)
    assert isinstance(plan, Plan)
    uses = uses_of(plan, machine)
    assert len(plan.tiles) == len(uses) > 0
    for use in uses:
        found = candidates(chain, given, machine, use)
        assert 0 < len(found) <= MOST
        plans = [one.plan for one in found]
        assert all(one != plan and plans.count(one) == 1 for one in plans)
        for one in found:
            assert all(value in SETTINGS[use.kind][name] for name, value in one.row.settings)
            for product in (one.plan.own, one.plan.gradients.of_input, one.plan.gradients.of_weight):
                assert isinstance(product, (FewChannels, type(None))) or product.shared_bytes <= CARDS[90]


def test_products_in_place_take_a_tuned_tile_that_fits() -> None:
    chain = Builder(3, conv(3, (64, 128), padding=1)).norm(8).op("silu").chain()
    given = problem(chain, (2, 64, 64, 64, 64), "channels_last", device="cuda")
    given = dataclasses.replace(given, tensors=tuple(dataclasses.replace(t, dtype="float16") for t in given.tensors))
    shipped = lower(chain, given, card(90))
    assert isinstance(shipped, Plan)
    assert isinstance(shipped.own, Boxes)
    use = uses_of(shipped, card(90))[0]
    assert (use.kind, shipped.tiles[0].endswith(MEASURED)) == ("product in place", True)
    machine = tuned(card(90), use, columns=64, steps=32, stages=4)
    plan = lower(chain, given, machine)
    assert isinstance(plan, Plan)
    assert isinstance(plan.own, Boxes)
    assert (plan.own.block_h * plan.own.block_j, plan.own.block_k, plan.own.stages) == (64, 32, 4)
    assert "tuned on this card" in plan.tiles[0]
    small = with_shared_bytes(tuned(card(90), use, columns=256, steps=64, stages=4), 110_000)
    plan = lower(chain, given, small)
    assert isinstance(plan, Plan)
    assert plan.own == shipped.own
    assert plan.tiles[0].endswith(MEASURED)
    tiles = [one.plan.own for one in candidates(chain, given, card(90), use)]
    assert tiles
    assert all(isinstance(one, Boxes) and 128 * one.block_h * one.block_j <= 160 * 32 * 4 for one in tiles)


def test_candidates_are_refused_where_registers_would_not_last() -> None:
    (use,) = product_uses("product", CONV, ONE, card(90))
    found = candidates(CHAIN_61, dataclasses.replace(asked(CHAIN_61), precision="tf32"), card(90), use)
    tiles = [one.plan.own for one in found]
    assert all(isinstance(one, Gemm) and one.rows * one.columns <= 160 * 32 * one.warps for one in tiles)
    assert any(isinstance(one, Gemm) and one.rows == 256 for one in tiles)


def test_float64_is_not_tuned() -> None:
    given = asked(CHAIN_61)
    given = dataclasses.replace(given, tensors=tuple(dataclasses.replace(t, dtype="float64") for t in given.tensors))
    plan = lower(CHAIN_61, given, card(90), even_if_slower=True)
    assert isinstance(plan, Plan)
    assert [use.kind for use in uses_of(plan, card(90))] == ["last pass"]


def test_origins_are_said() -> None:
    machine, given = card(90), asked(CHAIN_61)
    plan = lower(CHAIN_61, given, machine)
    assert isinstance(plan, Plan)
    first, second = plan.tiles
    assert first == f"product (2 planes, 64→128 channels): {MEASURED}"
    assert second.startswith("last pass (float32, 128 channels, contiguous)")
    use = uses_of(plan, machine)[0]
    machine = tuned(machine, use, rows=64, stages=3, warps=8)
    plan = lower(CHAIN_61, given, machine)
    assert isinstance(plan, Plan)
    assert plan.tiles[0].endswith("tuned on this card on 2026-01-02")
    machine = tuned(card(90), use, rows=256, stages=4, warps=8)  # does not fit
    plan = lower(CHAIN_61, given, machine)
    assert isinstance(plan, Plan)
    assert plan.tiles[0].endswith(MEASURED)


def test_few_channels_start_from_the_tables_tile() -> None:
    machine, given = card(90), asked(CHAIN_23, needs_grad=True)
    plan = lower(CHAIN_23, given, machine)
    assert isinstance(plan, Plan)
    assert plan.gradients.of_both is not None
    few, gradients = uses_of(plan, machine)
    machine = tuned(tuned(machine, few, depth=6, height=4, blocks=1), gradients, height=8)
    plan = lower(CHAIN_23, given, machine)
    assert isinstance(plan, Plan)
    assert isinstance(plan.own, FewChannels)
    assert plan.gradients.of_both is not None
    assert (plan.own.depth, plan.own.height, plan.own.blocks) == (6, 4, 1)
    assert plan.gradients.of_both.both.height == 8
