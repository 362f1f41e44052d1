"""Machines that are not here, faked where hardware.py asks: each is declined with one sentence, or served."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases import CHAIN_61
from postlude import hardware
from postlude.check import tensors_for
from postlude.graph import backend
from postlude.plan import Plan, Problem, Refusal, lower, problem_of

NEEDED = "the GPU passes need an NVIDIA card of Ampere or later"


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    hardware.machine_for.cache_clear()
    yield
    hardware.machine_for.cache_clear()


def a_card(
    monkeypatch: pytest.MonkeyPatch, major: int, minor: int, hip: str | None = None, triton: bool = True
) -> None:
    properties = SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=132,
        L2_cache_size=50 << 20,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        gcnArchName=f"{hip}:sramecc+:xnack-",
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.version, "hip", hip and "6.4")
    monkeypatch.setattr(hardware, "norms_keeping_layout", lambda _device: frozenset({"group_norm"}))
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


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_devices_are_declined_without_being_asked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("a device that is not here was asked")

    monkeypatch.setattr(hardware, "norms_keeping_layout", asked)
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
        ({"torch": "2.11.0+cu130", "triton": "3.6.0"}, []),
        ({"torch": "2.13.1", "triton": "not installed"}, []),
        ({"torch": "2.14.0a0+git1", "triton": "3.6.0"}, ["tested with torch 2.11 to 2.13, not with 2.14.0a0+git1"]),
        ({"torch": "2.10.1", "triton": "3.5.1"}, ["not with 2.10.1", "not with 3.5.1"]),
    ],
)
def test_untested_versions_are_said_once(
    found: dict[str, str], sentences: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hardware, "versions", lambda: found)
    backend._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "postlude"):
        backend._warn_once()
        backend._warn_once()
    backend._warn_once.cache_clear()
    assert len(caplog.messages) == len(sentences)
    assert all(part in message for part, message in zip(sentences, caplog.messages))
