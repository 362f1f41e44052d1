"""How exported files launch CUDA C++: with a driver that stands in for a card's."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude.export.cuda import COMPILE

pytestmark = pytest.mark.pure
NO_CONTEXT = 201  # what the driver says in a thread that has not used CUDA yet


class Card:
    """Answers launches with these codes, one after another; an event binds a context."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *codes: int) -> None:
        self.codes, self.events = list(codes), 0
        kernel = SimpleNamespace(func=None, set_shared_memory_config=lambda size: None)
        driver = SimpleNamespace(cuLaunchKernel=lambda *_: self.codes.pop(0))
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        monkeypatch.setattr(torch.cuda, "_compile_kernel", lambda source, name: kernel)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=self.bind))

    def bind(self) -> None:
        self.events += 1

    def launch(self) -> None:
        names: dict[str, Any] = {"functools": functools, "ctypes": ctypes, "torch": torch, "Tensor": Tensor, "Any": Any}
        exec(COMPILE, names)
        made: Callable[..., None] = names["compiled"]("source", "kernel", 0, -1)
        made((1, 1, 1), (32, 1, 1), (torch.ones(1), 2))


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, NO_CONTEXT, 0)
    card.launch()
    assert (card.codes, card.events) == ([], 1)


def test_other_refusals_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for codes in ((700,), (NO_CONTEXT, 700)):
        with pytest.raises(RuntimeError, match="CUDA refused to launch kernel: error 700"):
            Card(monkeypatch, *codes).launch()


def test_a_launch_that_succeeds_needs_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, 0)
    card.launch()
    assert card.events == 0
