"""Machines that are not here, faked where hardware.py asks: each is declined with one sentence, or served."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases import CHAIN_61
from postlude import hardware
from postlude.check import tensors_for
from postlude.check.modes import resolve
from postlude.graph import backend
from postlude.plan import Plan, Problem, Refusal, lower, problem_of
from postlude.run import execute, site
from postlude.tile_table import Row, TileTable, TileUse, write_table

NEEDED = "the GPU passes need an NVIDIA card of Ampere or later"


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    hardware._machine.cache_clear()
    yield
    hardware._machine.cache_clear()


def properties(major: int, minor: int, name: str = "a card", count: int = 132, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=count,
        L2_cache_size=50 << 20,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        **more,
    )


def a_card(
    monkeypatch: pytest.MonkeyPatch, major: int, minor: int, hip: str | None = None, triton: bool = True
) -> None:
    some_cards(monkeypatch, properties(major, minor, gcnArchName=f"{hip}:sramecc+:xnack-"), triton=triton)
    monkeypatch.setattr(torch.version, "hip", hip and "6.4")


def some_cards(monkeypatch: pytest.MonkeyPatch, *found: SimpleNamespace, triton: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(hardware, "keeping_layout", lambda _device: frozenset({"group_norm"}))
    monkeypatch.setattr(hardware, "has_triton", lambda: triton)


def problem_on(device: str) -> Problem:
    tensors = tensors_for(CHAIN_61, (2, 64, 4, 4, 4), torch.float16)
    return dataclasses.replace(problem_of(tensors), device=device)


def outcome(device: str) -> Plan | Refusal:
    return lower(CHAIN_61, problem_on(device), hardware.machine_for(device), even_if_slower=True)


@pytest.mark.parametrize(
    ("card", "sentence"),
    [
        ({"major": 7, "minor": 5}, "the GPU passes need an NVIDIA card of Ampere or later, not sm_75"),
        (
            {"major": 9, "minor": 4, "hip": "gfx942"},
            "the GPU passes need an NVIDIA card of Ampere or later, not gfx942",
        ),
        ({"major": 9, "minor": 0, "triton": False}, "Triton is not installed, which the GPU passes need"),
    ],
    ids=["Turing", "ROCm", "Windows without Triton"],
)
def test_a_card_that_cannot_is_declined_with_one_sentence(
    card: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_card(monkeypatch, **card)
    found = outcome("cuda")
    assert isinstance(found, Refusal)
    assert found.reasons == (sentence,)


@pytest.mark.parametrize(("major", "minor"), [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_ampere_and_later_are_served(major: int, minor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a_card(monkeypatch, major, minor)
    assert isinstance(outcome("cuda"), Plan)


H200 = properties(9, 0, "NVIDIA H200")
L4 = properties(8, 9, "NVIDIA L4", 58, clock_rate=2_040_000, memory_clock_rate=6_251_000, memory_bus_width=192)


def test_each_gpu_of_a_machine_is_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    some_cards(monkeypatch, H200, L4)
    first, second = (hardware.machine_for(torch.device("cuda", index)) for index in (0, 1))
    assert (first.card.name, first.card.is_measured, first.threads) == ("H200", True, 132)
    assert (second.card.name, second.card.figures, second.threads) == ("NVIDIA L4", "estimated", 58)
    assert second.card.rates.bandwidth == pytest.approx(300e9, rel=0.01)
    assert second.card.rates.peak["16 bits"] == pytest.approx(121e12, rel=0.01)
    assert hardware.machine_for("cuda:0") is first
    assert hardware.machine_for("cuda") is first
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert hardware.machine_for("cuda") is second


def test_a_driver_that_reports_no_clock_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    some_cards(monkeypatch, properties(8, 6, "NVIDIA RTX A2000", 26))
    card = hardware.machine_for("cuda").card
    assert card.figures == "estimated"
    assert 0 < card.rates.copy < 1e12


def test_plans_are_made_for_the_gpu_that_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call on the second card must not get what was planned for the first."""
    some_cards(monkeypatch, H200, L4)
    tensors = tensors_for(CHAIN_61, (2, 64, 4, 4, 4), torch.float16)
    large = problem_of(tensors).tensors
    large = (dataclasses.replace(large[0], shape=(16, 64, 32, 32, 32)), *large[1:])
    asked = [Problem(large, "cuda", "auto", False, index=index) for index in (0, 1)]
    first, second = (execute.prepared(CHAIN_61, one)[0] for one in asked)
    assert first == lower(CHAIN_61, asked[0], hardware.machine_for("cuda:0"))
    assert second == lower(CHAIN_61, asked[1], hardware.machine_for("cuda:1"))
    assert first != second
    execute.prepared.cache_clear()


def test_a_site_looks_up_by_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of one shape on another GPU are another problem."""

    class OnGpu(torch.Tensor):
        is_cuda, place = True, 0  # type: ignore[assignment]

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda", self.place)

    met: list[int] = []

    def enter(_asked: Any, key: Any, tensors: tuple[OnGpu]) -> SimpleNamespace:
        met.append(tensors[0].place)
        here._table[key] = SimpleNamespace(runner=lambda _: place)
        return here._table[key]

    given, here = torch.zeros(2).as_subclass(OnGpu), site.Site("layer", CHAIN_61)
    monkeypatch.setattr(here.ledger, "enter", enter)
    monkeypatch.setattr(here, "asked", lambda _: None)
    for place in (0, 1, 0):
        given.place = place
        here(given)
    assert met == [0, 1]


def test_tiles_of_another_gpu_of_the_machine_are_nothing_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    names = ["NVIDIA H200", "NVIDIA L4"]
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hardware, "versions", lambda: {"gpu": names[0], "torch": "2.11", "triton": "3.6"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    hardware.tuned_tiles.cache_clear()
    row = Row(TileUse("last pass", layout="contiguous"), (("elements", 512),), tuned="2026-01-02")
    write_table(tmp_path, hardware.tile_key(0), TileTable((row,)))
    assert hardware.tuned_tiles(0).rows == (row,)
    assert hardware.tuned_tiles(1).rows == ()
    assert not recwarn.list
    hardware.tuned_tiles.cache_clear()
    names[0] = "another card, which is gone"  # then the table is nobody's, and that is said
    assert hardware.tuned_tiles(1).rows == ()
    assert len(recwarn.list) == 1
    hardware.tuned_tiles.cache_clear()


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_devices_are_declined_without_being_asked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("a device that is not here was asked")

    monkeypatch.setattr(hardware, "keeping_layout", asked)
    found = outcome(device)
    assert isinstance(found, Refusal)
    assert found.reasons == (f"there are no fused passes for {device} devices",)


def test_the_cpu_serves_without_triton_and_without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "has_triton", lambda: False)
    monkeypatch.setattr(hardware, "has_glibc", lambda: False)
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert hardware.usable_cores() == torch.get_num_threads()
    assert isinstance(outcome("cpu"), Plan)


@pytest.mark.parametrize(
    ("found", "sentences"),
    [
        ({"torch": "2.11.0+cu130", "triton": "3.6.0", "gpu": "H200"}, []),
        ({"torch": "2.13.1", "triton": "not installed", "gpu": "H200"}, []),
        ({"torch": "2.16.0a0+git1", "triton": "3.6.0"}, ["torch 2.11 to 2.15, not with 2.16.0a0+git1"]),
        ({"torch": "2.10.1", "triton": "3.5.1", "gpu": "H200"}, ["not with 2.10.1", "triton 3.6, not with 3.5.1"]),
        ({"torch": "2.15.0", "triton": "3.9.0"}, []),  # nothing of Triton's runs
    ],
)
def test_untested_versions_are_said_once(
    found: dict[str, str], sentences: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("postlude.tested.versions", lambda: found)
    backend._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "postlude"):
        backend._warn_once()
        backend._warn_once()
    backend._warn_once.cache_clear()
    assert len(caplog.messages) == len(sentences)
    assert all(part in message for part, message in zip(sentences, caplog.messages))


def test_matrix_products_have_a_switch_of_their_own() -> None:
    conv, matmul = torch.backends.cudnn.conv, torch.backends.cuda.matmul  # type: ignore[attr-defined]
    before = conv.fp32_precision, matmul.fp32_precision
    try:
        for switches in (("tf32", "ieee"), ("ieee", "tf32")):
            conv.fp32_precision, matmul.fp32_precision = switches
            found = [hardware.default_fp32_precision(is_linear) for is_linear in (False, True)]
            assert found == ["fp32" if one == "ieee" else one for one in switches]
    finally:
        conv.fp32_precision, matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("card", "precision"),
    [
        ({"major": 7, "minor": 5}, "fp32"),
        ({"major": 9, "minor": 4, "hip": "gfx942"}, "fp32"),
        ({"major": 8, "minor": 0}, "tf32"),
    ],
    ids=["Turing", "ROCm", "Ampere"],
)
def test_the_switch_for_tf32_counts_on_cards_that_have_it(
    card: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's switch allows TF32 on any card. A budget for TF32 would let rounded operands pass."""
    a_card(monkeypatch, **card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hardware.default_fp32_precision() == "tf32"
    assert resolve("auto", torch.float32, torch.device("cuda")) == precision
