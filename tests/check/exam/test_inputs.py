"""References that draw random numbers, take integers and numbers, or accept any size: what is tried."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from postlude.check.exam import truths
from postlude.check.modules import verify_modules
from postlude.check.same_draws import SameDraws


class Noisy(nn.Module):
    """A layer with noise by one of PyTorch's functions, times `factor`, and a share of the layer."""

    def __init__(self, draw: str = "randn_like", share: float = 1.0, factor: float = 0.1) -> None:
        super().__init__()
        self.linear, self.draw, self.share, self.factor = nn.Linear(6, 7), draw, share, factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        noise = {
            "randn_like": lambda: torch.randn_like(y),
            "rand": lambda: torch.rand(y.shape, dtype=y.dtype),
            "normal_": lambda: torch.empty_like(y).normal_(),
        }[self.draw]()
        return self.share * y + self.factor * noise


@pytest.mark.parametrize("draw", ["randn_like", "rand", "normal_"])
def test_noise_is_part_of_the_answer(draw: str) -> None:
    inputs = (torch.randn(5, 6),)
    assert verify_modules(Noisy(draw), Noisy(draw), inputs).right
    for wrong in (Noisy(draw, share=1.02), Noisy(draw, factor=0.0)):
        verdict = verify_modules(Noisy(draw), wrong, inputs)
        assert verdict.outcome == "wrong"
    assert verdict.budget is not None
    assert verdict.budget.rms < 1e-5


class Started(nn.Module):
    """An LSTM with a first state of its own, which has PyTorch's default dtype."""

    def __init__(self, make: Callable[..., Tensor] = torch.randn) -> None:
        super().__init__()
        self.lstm, self.make = nn.LSTM(6, 5, batch_first=True), make

    def forward(self, x: Tensor) -> Tensor:
        start = self.make(1, x.shape[0], 5, device=x.device)
        result: Tensor = self.lstm(x, (start, torch.zeros(1, x.shape[0], 5)))[0]
        return result


def test_tensors_that_a_reference_makes_have_its_dtype() -> None:
    inputs = (torch.randn(4, 7, 6),)
    verdict = verify_modules(Started(), Started(), inputs)
    assert verdict.right, verdict
    assert verify_modules(Started(), Started(torch.ones), inputs).outcome == "wrong"


def test_noise_that_passes_for_pytorchs_error_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: float64 draws numbers of its own."""
    monkeypatch.setattr(truths.Truths, "_drawing", lambda self, side: nullcontext())
    verdict = verify_modules(Noisy(), Noisy(), (torch.randn(5, 6),))
    assert verdict.budget is not None
    assert verdict.budget.rms > 1e-2


class Labelled(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x, labels, reduction="none")


class Unlabelled(nn.Module):
    """Knows the file's own labels."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x, torch.arange(len(x)) % x.shape[1], reduction="none")


def test_labels_change_with_the_samples() -> None:
    inputs = (torch.randn(12, 5), torch.arange(12) % 5)
    assert verify_modules(Labelled(), Labelled(), inputs).right
    assert verify_modules(Labelled(), Unlabelled(), inputs).outcome == "wrong"


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.table(ids).relu()
        return found


def test_integers_alone_can_tell() -> None:
    ids = torch.randint(0, 9, (4, 8))
    assert verify_modules(Looking(), Looking(), (ids,)).right


class Sorted(nn.Module):
    """Accepts its integers in one order only."""

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        if bool((starts.diff() < 0).any()):
            raise ValueError("starts must not decrease")
        return x.cumsum(1) + starts[0]


def test_integers_that_must_stay_are_left_and_that_is_said() -> None:
    verdict = verify_modules(Sorted(), Sorted(), (torch.randn(4, 6), torch.arange(5)))
    assert verdict.right, verdict
    assert any(note.startswith("left out: other integers than the file's") for note in verdict.notes)


class Largest(nn.Module):
    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(self.axis)


class Always(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), dtype=torch.int64)


def test_results_of_integers_are_equal_or_wrong() -> None:
    inputs = (torch.randn(6, 6),)
    verdict = verify_modules(Largest(), Largest(), inputs)
    assert verdict.right
    assert "the result consists of integers, and all of them are PyTorch's" in verdict.notes
    assert verify_modules(Largest(), Always(), inputs).outcome == "wrong"
    assert verify_modules(Always(), Always(), inputs).outcome == "cannot tell"


class Bounded(nn.Module):
    """Right up to so many samples, and rows of such a length."""

    def __init__(self, samples: int = 1 << 30, length: int = 1 << 30) -> None:
        super().__init__()
        self.conv, self.samples, self.length = nn.Conv2d(3, 4, 3), samples, length

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        return y * 0 if len(x) > self.samples or x.shape[-1] > self.length else y


@pytest.mark.parametrize("limit", [{"samples": 4}, {"samples": 8}, {"length": 20}])
def test_sizes_above_the_declared_ones_are_tried(limit: dict[str, int]) -> None:
    inputs = (torch.randn(4, 3, 18, 20),)
    assert verify_modules(Bounded(), Bounded(), inputs).right
    assert verify_modules(Bounded(), Bounded(**limit), inputs).outcome == "wrong"


class Scaled(nn.Module):
    def __init__(self, known: float | None = None) -> None:
        super().__init__()
        self.known = known

    def forward(self, x: Tensor, scale: float, power: int) -> Tensor:
        return x.sin() * (self.known or scale) ** power


def test_numbers_are_varied_or_named() -> None:
    inputs: tuple[Any, ...] = (torch.randn(5, 6), 1.7, 2)
    verdict = verify_modules(Scaled(), Scaled(), inputs)
    assert verdict.right
    assert "left out: other values of inputs that are not tensors (2)" in verdict.notes
    assert verify_modules(Scaled(), Scaled(1.7), inputs).outcome == "wrong"


def test_the_reference_in_float64_is_not_wrapped() -> None:
    """There PyTorch is the truth itself."""
    made = truths.Truths(Noisy().double(), (torch.randn(5, 6).double(),), "auto")
    assert not isinstance(made._drawing(made.exact_side), SameDraws)
