"""Average pools that are folded into their convolution: identities in float64, gradients, and where they are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from cases import Builder, conv
from level2 import POOLED, up
from machines import H200
from plan.test_lower import problem
from plan.test_through import assert_trains, result_through
from postlude import reference
from postlude.chain import Chain, Pool
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, lower
from postlude.plan import through as plans
from postlude.plan.folding import folded_flops, folding_of
from postlude.plan.linear import LinearGemm
from postlude.plan.rules import FOLDED, rules_of
from postlude.plan.through import Through, through_for
from postlude.run.execute import prepare
from postlude.stages import folding, through

DEPTH = Builder(3, conv(3, (2, 3), transposed=True, padding=1)).pool("avg", (6, 1, 1)).op("add", "channel").softmax()
CASES: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "plain": (Builder(2, conv(2, (3, 4))).pool("avg", 2).op("mul", 3.0).chain(), (2, 3, 9, 8)),
    "padded": (Builder(2, conv(2, (3, 4), 5, padding=2)).op("mul", "channel").pool("avg", 3).chain(), (2, 3, 9, 11)),
    "strided": (Builder(2, conv(2, (3, 4), stride=2, padding=1)).op("sub", 0.5).pool("avg", 2).chain(), (2, 3, 11, 10)),
    "overlapping": (Builder(3, conv(3, (2, 3), 2)).pool("avg", 3, 2).chain(), (2, 2, 8, 7, 9)),
    "upwards": (
        Builder(3, up(3, (2, 3), 3, 1, 0))
        .op("mul", "one")
        .pool("avg", 2)
        .op("add", "channel")
        .op("mul", "one")
        .chain(),
        (2, 2, 4, 5, 6),
    ),
    "upwards, four taps": (Builder(2, up(2, (3, 4), 4, 1, 0)).pool("avg", 2).chain(), (2, 3, 5, 6)),
    "upwards, every other": (Builder(2, up(2, (3, 4), 5, 2, 1)).op("rsub", 1.0).pool("avg", 4).chain(), (2, 3, 6, 5)),
    "depth": (DEPTH.chain(), (2, 2, 6, 4, 5)),
    "depth, upwards": (Builder(3, up(3, (2, 3))).pool("avg", (8, 1, 1)).op("sub", 0.5).chain(), (2, 2, 4, 3, 5)),
    "height": (Builder(3, conv(3, (2, 3))).op("mul", 2.0).pool("avg", (1, 5, 1)).chain(), (2, 2, 5, 7, 6)),
    "features": (Builder(0, conv(0, (6, 13))).pool("avg", 4).op("gelu", approximate="none").chain(), (5, 6)),
    "features without a bias": (
        Builder(0, conv(0, (6, 12), bias=False)).pool("avg", 3).reduce("max", "channels").chain(),
        (5, 6),
    ),
    "height of two": (Builder(2, conv(2, (3, 4), padding=1)).pool("avg", (5, 1)).chain(), (2, 3, 5, 6)),
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the problem."""
    monkeypatch.setattr(plans, "_is_less", lambda *_: True)


def planned(chain: Chain, shape: tuple[int, ...], **changes: object) -> Plan:
    plan = lower(chain, problem(chain, shape, device="cuda", **changes), H200, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    return plan


def error(chain: Chain, shape: tuple[int, ...]) -> float:
    tensors = tensors_for(chain, shape, torch.float64)
    number = next(number for number, step in enumerate(chain.steps, 1) if isinstance(step, Pool))
    step = chain.steps[number - 1]
    assert isinstance(step, Pool)
    own = Through(number, folding_of(chain.convolution, step, shape[2:]))
    ours = result_through(chain, own, tensors)
    truth = reference.evaluate(dataclasses.replace(chain, steps=chain.steps[:number]), tensors)
    assert ours.shape == truth.shape
    assert ours.stride() == truth.stride()
    return float((ours - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("always")
def test_is_an_identity(name: str) -> None:
    chain, shape = CASES[name]
    plan = planned(chain, shape)
    assert isinstance(plan.own, Through)
    assert rules_of(plan) == (FOLDED,)
    assert error(chain, shape) < 1e-13


@pytest.mark.interpret
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("always")
def test_runs_and_has_gradients(name: str) -> None:
    assert_trains(*CASES[name], planned(*CASES[name], needs_grad=True))


MUTANTS = [
    ("upwards", "flip", lambda weight, _: weight),
    ("upwards", "flip", lambda weight, axes: torch.flip(weight, axes[:1])),
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_taps_in_another_order_are_seen(mutant: tuple[str, str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    name, word, wrong = mutant
    monkeypatch.setattr(torch.Tensor, word, wrong)
    assert error(*CASES[name]) > 1e-3


def test_a_first_tap_that_is_not_met_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = folding.average_through

    def wrong(conv: object, found: object, *tensors: object) -> object:
        return honest(conv, dataclasses.replace(found, first=(0, 0, 0)), *tensors)  # type: ignore[arg-type, type-var]

    monkeypatch.setattr(through, "average_through", wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        assert error(*CASES["upwards"]) < 1e-3


def test_a_tap_that_meets_one_position_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = folding.runs_along

    def wrong(*given: object) -> list[tuple[int, int]]:
        (low, high), *rest = honest(*given)  # type: ignore[arg-type]
        return [(low, high - 1), *rest]

    monkeypatch.setattr(folding, "runs_along", wrong)
    assert error(*CASES["depth"]) > 1e-3


OTHERS = {
    "a largest": Builder(2, conv(2, (3, 4))).pool("max", 2).chain(),
    "a border": Builder(2, conv(2, (3, 4))).pool("avg", 3, 2, 1).chain(),
    "a divisor": Builder(2, conv(2, (3, 4))).pool("avg", 2, divisor=3).chain(),
    "not affine": Builder(2, conv(2, (3, 4))).op("relu").pool("avg", 2).chain(),
    "windows between strides": Builder(2, up(2, (3, 4))).pool("avg", 3).chain(),
    "groups": Builder(2, conv(2, (4, 4), groups=2)).pool("avg", 2).chain(),
    "dilated": Builder(2, conv(2, (3, 4), dilation=2)).pool("avg", 2).chain(),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("always")
def test_is_not_used(name: str) -> None:
    chain = OTHERS[name]
    shape = (2, chain.convolution.in_channels, 12, 12)
    assert through_for(chain, problem(chain, shape, device="cuda"), H200.card) is None


@pytest.mark.usefixtures("always")
def test_only_in_contiguous_fp32_on_a_gpu() -> None:
    wide = Builder(2, conv(2, (16, 4))).pool("avg", 2).chain()
    few, shape = Builder(2, conv(2, (8, 4))).pool("avg", 2).chain(), (2, 8, 12, 12)
    for changes, is_used in (
        ({}, True),
        ({"allows_tf32": True}, True),  # cuDNN does not use it with so few channels
        ({"allows_tf32": True, "precision": "fp32"}, False),
        ({"precision": "tf32"}, False),
        ({"layout": "channels_last"}, False),
        ({"hands_on": "channels_last"}, False),
        ({"convolution": "pytorch"}, False),
    ):
        found = through_for(few, problem(few, shape, **{"device": "cuda", **changes}), H200.card)
        assert (found is not None) == is_used, changes
    assert through_for(few, problem(few, shape), H200.card) is None
    given = problem(wide, (2, 16, 12, 12), device="cuda", allows_tf32=True)
    assert through_for(wide, given, H200.card) is None


def test_where_a_pool_of_features_is_no_part_of_the_weight_the_layer_is_planned_without_it() -> None:
    chain = Builder(0, conv(0, (4096, 4096))).pool("avg", 4).op("tanh").chain()
    for trains in (False, True):
        kinds = {"precision": "fp32", "multiplies_tf32": True, "needs_grad": trains}
        plan = planned(chain, (1024, 4096), **kinds)
        assert isinstance(plan.own, LinearGemm)
        assert plan.chain.steps == ()
        assert "avg_pool(4) → tanh: PyTorch's" in str(plan)
    # Windows of four save less than tensor cores do.
    assert isinstance(planned(chain, (1024, 4096)).own, LinearGemm)
    wider = Builder(0, conv(0, (4096, 4096))).pool("avg", 16).op("tanh").chain()
    assert isinstance(planned(wider, (1024, 4096)).own, Through)
    for built in (
        Builder(0, conv(0, (4096, 4096))).op("relu").pool("avg", 4),
        Builder(0, conv(0, (4096, 4096))).pool("avg", 4, 2),
    ):
        found = planned(built.chain(), (1024, 4096))
        assert not isinstance(found.own, Through)
        assert found.chain.steps == built.chain().steps[:-1]


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.usefixtures("always")
def test_is_right_by_the_rule_except_that_infinities_stay(tells: bool) -> None:
    """The second run is what the rule says that it does not keep, and is seen."""
    chain, shape = CASES["upwards"]

    def run(chain: Chain, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return prepare(chain, planned(chain, shape))(list(tensors))

    points = chain_points(chain, shape)
    assert verify_chain(run, chain, points, tells_infinities=tells).right == (not tells)


def test_is_not_used_where_a_step_after_it_makes_infinities_finite() -> None:
    chain, shape = POOLED["65"]
    assert not isinstance(planned(chain, shape).own, Through)


@pytest.mark.parametrize(("name", "part"), [("50", 0.6)])
def test_level2_has_fewer_operations_and_stores_no_unpooled_value(name: str, part: float) -> None:
    chain, shape = POOLED[name]
    plan = planned(chain, shape)
    assert isinstance(plan.own, Through)
    assert plan.own.folding is not None
    assert plan.slab_bytes == 0
    flops = chain.convolution.flops(shape[0], shape[2:])
    assert folded_flops(plan.own.folding, shape[0]) < part * flops
    assert "an infinity in the input stays one" in str(plan)
    assert planned(chain, shape, needs_grad=True).own == plan.own


def test_the_mean_over_depth_of_13_takes_a_thirtieth() -> None:
    producer = conv(3, (16, 64), transposed=True, padding=1)
    chain = (
        Builder(3, producer).pool("avg", (32, 1, 1)).op("add", "channel").softmax().op("tanh").op("mul", 2.0).chain()
    )
    plan = planned(chain, (16, 16, 32, 128, 128), precision="fp32")
    assert isinstance(plan.own, Through)
    assert plan.own.folding is not None
    assert plan.own.folding.convolution == conv(2, (48, 64), transposed=True, padding=1, bias=False)
    assert 30 * folded_flops(plan.own.folding, 16) < producer.flops(16, (32, 128, 128))


def test_where_more_taps_than_windows_save_would_be_multiplied_it_stays() -> None:
    """Windows of two overlapping by one halve nothing: each result is needed."""
    chain = Builder(2, conv(2, (64, 64))).pool("avg", 2, 1).chain()
    assert not isinstance(planned(chain, (64, 64, 64, 64)).own, Through)
    assert folding_of(chain.convolution, chain.steps[0], (64, 64)) is not None  # type: ignore[arg-type]
