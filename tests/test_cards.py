"""Cards as values: which card a driver's answer means, and where the figures of unmeasured cards come from."""

from __future__ import annotations

import dataclasses

import pytest

from cases import CHAIN_61, Builder, conv
from machines import H200 as MEASURED
from machines import with_shared_bytes
from plan.test_lower import problem
from postlude import cards
from postlude.cards import A100, B200, H100, H200, KNOWN, L40S, RTX_4090, RTX_5090, ByMode, Card, card_for, estimated
from postlude.hardware import machine_on
from postlude.plan import Plan, Refusal, lower
from postlude.plan.gemm import Gemm

MODES = ("fp32", "tf32", "16 bits")


def as_driver_says(name: str, card: Card, multiprocessors: int | None = None) -> Card:
    count = card.multiprocessors if multiprocessors is None else multiprocessors
    return card_for(name, card.architecture, (count, card.shared_bytes, card.l2_bytes), 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H200", H200),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA A100-SXM4-80GB", A100),
        ("NVIDIA L40S", L40S),
        ("NVIDIA B200", B200),
        ("NVIDIA GeForce RTX 4090", RTX_4090),
        ("NVIDIA GeForce RTX 5090", RTX_5090),
    ],
)
def test_known_cards_are_found_by_name(name: str, card: Card) -> None:
    found = as_driver_says(name, card)
    assert found == card
    assert found.is_measured == (card is H200)


@pytest.mark.parametrize(
    ("name", "card", "multiprocessors"),
    [
        ("NVIDIA H200 MIG 1g.18gb", H200, 16),  # a part of it has a part of its rates
        ("NVIDIA GH200 480GB", H200, 132),
        ("NVIDIA H100 PCIe", H100, 114),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", RTX_4090, 76),
        ("NVIDIA L4", L40S, 58),
    ],
)
def test_others_are_estimated_and_say_so(name: str, card: Card, multiprocessors: int) -> None:
    found = as_driver_says(name, card, multiprocessors)
    assert (found.name, found.figures) == (name, "estimated")
    assert found.abilities == card.abilities
    assert "estimated" in str(found)
    assert "not measured" in str(found)
    assert all(found.rates.peak[mode] <= 1.05 * card.rates.peak[mode] for mode in MODES)


def test_cards_of_one_name_may_have_other_memory() -> None:
    given = (A100.architecture, (A100.multiprocessors, A100.shared_bytes, A100.l2_bytes), 1.41e9)
    found = card_for("NVIDIA A100-PCIE-40GB", *given, 1.555e12)
    assert found.rates.bandwidth == 1.555e12
    assert found.rates.copy < A100.rates.copy
    assert found.rates.library == A100.rates.library


def from_properties(card: Card, name: str, clock: float) -> ByMode:
    sizes = (card.multiprocessors, card.shared_bytes, card.l2_bytes)
    return estimated(name, card.architecture, sizes, clock, card.rates.bandwidth).rates.peak


def test_properties_tell_the_published_peaks() -> None:
    """What a driver reports of a known card gives what NVIDIA publishes of it, so it will do for unknown ones."""
    clocks = {H200: 1.83e9, H100: 1.83e9, A100: 1.41e9, L40S: 2.49e9, B200: 1.86e9, RTX_4090: 2.52e9, RTX_5090: 2.41e9}
    assert set(clocks) == set(KNOWN)
    for card, clock in clocks.items():
        found = from_properties(card, f"GeForce {card.name}" if "RTX" in card.name else card.name, clock)
        for mode in MODES:
            assert found[mode] == pytest.approx(card.rates.peak[mode], rel=0.12), (card.name, mode)
    # Not a word about a GeForce: twice its rate, which the comparison sees.
    mutant = from_properties(RTX_4090, RTX_4090.name, clocks[RTX_4090])
    assert mutant["16 bits"] != pytest.approx(RTX_4090.rates.peak["16 bits"], rel=0.12)


@pytest.mark.parametrize("card", KNOWN, ids=lambda card: card.name)
def test_crossovers_are_the_h200s_in_seconds(card: Card) -> None:
    """A launch costs the host the same with a slower card, which does less in that time."""
    for mode in MODES:
        seconds = [one.crossovers.packing[mode] / one.rates.library[mode] for one in (card, H200)]
        assert seconds[0] == pytest.approx(seconds[1])
    seconds = [one.crossovers.smallest / one.rates.cache for one in (card, H200)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-5)
    assert card.rates.library["tf32"] * card.rates.library_flat * card.rates.library_last < card.rates.peak["tf32"]
    assert all(card.rates.library[mode] < card.rates.peak[mode] for mode in MODES)


def test_abilities_follow_the_architecture() -> None:
    boxes = [card.name for card in KNOWN if card.abilities.reads_boxes_in_place]
    assert boxes == ["H200", "H100"]
    assert [card.name for card in KNOWN if card.abilities.has_tma] == ["H200", "H100", "B200", "RTX 5090"]
    assert all(card.is_served for card in KNOWN)
    assert not any(as_driver_says("old", dataclasses.replace(A100, architecture=a)).is_served for a in ("sm_75", ""))
    # A newer architecture is taken for the newest known one before it, and an AMD card's number for none.
    assert as_driver_says("new", dataclasses.replace(B200, architecture="sm_103")).abilities == B200.abilities
    assert cards.capability_of("sm_120") == (12, 0)
    assert cards.capability_of("gfx942") == (0, 0)


def test_an_ability_is_what_decides() -> None:
    """Not the architecture's name: without wgmma the same card gets the packed product and PyTorch's gradients."""
    chain = Builder(3, conv(3, (64, 64), padding=1)).norm(8).chain()
    given = problem(chain, (2, 64, 64, 64, 64), "channels_last", device="cuda", needs_grad=True)
    half = tuple(dataclasses.replace(spec, dtype="float16") for spec in given.tensors)
    given = dataclasses.replace(given, tensors=half)
    less = dataclasses.replace(H200.abilities, has_wgmma=False)
    found = lower(chain, given, MEASURED), lower(chain, given, machine_on(dataclasses.replace(H200, abilities=less)))
    assert isinstance(found[0], Plan)
    assert isinstance(found[1], Plan)
    assert (type(found[0].own), found[0].gradients.of_weight is None) != (Gemm, True)
    assert (type(found[1].own), found[1].gradients.of_weight) == (Gemm, None)


def test_fp32_is_pytorchs_where_tensor_cores_are_too_slow_for_three_products() -> None:
    given = problem(CHAIN_61, (16, 64, 32, 32, 32), device="cuda", precision="fp32")
    for card, is_ours in ((H200, True), (A100, True), (B200, True), (RTX_4090, False), (RTX_5090, False)):
        plan = lower(CHAIN_61, given, machine_on(card))
        assert isinstance(plan, Plan)
        assert (plan.own is not None) == is_ours, card.name
    assert "it reaches more operations per second in fp32 on this card" in plan.reasons[0]
    tf32 = lower(CHAIN_61, dataclasses.replace(given, precision="tf32"), machine_on(RTX_4090))
    assert isinstance(tf32, Plan)
    assert tf32.own is not None


def test_a_cards_own_rates_make_its_plans() -> None:
    """A value of 6 MiB is too small for an H200; an A100 takes longer over it than its launches do."""
    chain = Builder(3).norm(8).op("relu").chain()
    given = problem(chain, (1, 32, 24, 64, 32), device="cuda")
    assert 5 << 20 < given.x.bytes < 8 << 20
    assert isinstance(lower(chain, given, MEASURED), Refusal)
    assert isinstance(lower(chain, given, machine_on(A100)), Plan)
    slow = dataclasses.replace(A100, crossovers=H200.crossovers)
    assert isinstance(lower(chain, given, machine_on(slow)), Refusal)


def test_a_machine_has_what_its_card_has() -> None:
    machine = with_shared_bytes(machine_on(A100), 100_000)
    assert (machine.threads, machine.cache_bytes, machine.device) == (108, 40 << 20, "cuda")
    assert machine.card.shared_bytes == 100_000
