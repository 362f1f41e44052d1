"""Errors fall into the right bins, and a timed result of another input, precision or call is seen."""

from __future__ import annotations

import math

import pytest
import torch

from postlude.check import deviations
from postlude.check.distribution import belongs, distribution


def test_bins_hold_every_error() -> None:
    truth = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    result = truth.clone()
    result[:100] += 1e-3 * truth.std()
    result[100:300] += 1e-6 * truth.std()
    found = distribution(result, truth)
    assert found is not None
    assert (found.exact, sum(found.counts)) == (701, 300)
    assert len(found.edges) == len(found.counts) + 1
    assert found.counts[0] + found.counts[1] == 200  # on the edge, rounding decides
    assert found.worst == pytest.approx(1e-3)
    assert found.edges[0] <= -6 <= -3 <= found.edges[-1]


def test_what_has_no_distribution() -> None:
    constant = torch.ones(4)
    assert distribution(constant, constant) is None
    assert distribution(torch.ones(3), torch.rand(4)) is None
    exact = torch.rand(8)
    found = distribution(exact, exact)
    assert found is not None
    assert (found.counts, found.exact) == ((), 8)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda y: y * (1 + 1e-6), False),
        (lambda y: y.bfloat16().float(), True),  # a lower precision
        (lambda y: y.roll(1, 0), True),  # of another sample
        (torch.zeros_like, True),
        (lambda y: y.mean() + 0 * y, True),
        (lambda y: y + math.nan, True),
        (lambda y: y[:2], True),
        (lambda y: [y], True),
    ],
    ids=["rounded", "bf16", "rolled", "zeros", "mean", "nan", "short", "list"],
)
def test_a_timed_result_must_be_that_of_its_input(change: object, seen: bool) -> None:
    expected = torch.randn(4, 8, 16)
    assert (belongs(change(expected), expected, "fp32") is not None) == seen  # type: ignore[operator]


def test_a_result_of_little_spread_is_measured_by_its_size() -> None:
    expected = 1 + 1e-5 * torch.randn(1000)
    assert belongs(expected + 1e-6, expected, "fp32") is None
    assert belongs(torch.zeros(1000), expected, "fp32") is not None
    assert belongs(expected * 1.01, expected, "bf16") is None


def test_a_budget_widens_what_is_allowed() -> None:
    expected = torch.randn(1000)
    off = expected + 1e-3 * torch.randn(1000)
    assert belongs(off, expected, "fp32") is not None
    assert belongs(off, expected, "fp32", allowed=1e-2) is None


def test_values_that_are_not_finite_must_be_at_the_same_places() -> None:
    expected = torch.randn(1000)
    expected[10] = math.inf
    assert belongs(expected.clone(), expected, "fp32") is None
    assert "NaN or infinite" in str(belongs(expected.roll(1), expected, "fp32"))
    assert belongs(torch.full((3,), math.nan), torch.full((3,), math.inf), "fp32") is None
    assert belongs(torch.rand(0), torch.rand(0), "fp32") is None


def test_squares_that_overflow_are_not_left_out() -> None:
    expected = torch.randn(100).double()
    wrong = expected.clone()
    wrong[0] = torch.finfo(torch.float64).max
    assert belongs(wrong, expected, "fp32") is not None


def test_large_results_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result of several GB and its float64 copies would not fit on a card."""
    monkeypatch.setitem(deviations.BLOCK, "cpu", 64)
    expected = torch.randn(10, 100) + 3
    assert belongs(expected.t().contiguous().t(), expected, "fp32") is None
    wrong = expected.clone()
    wrong[-1, -1] += 1
    assert belongs(wrong, expected, "fp32") == (
        f"differs from PyTorch's by {1 / math.sqrt(1000) / float(expected.std()):.2g} of the spread, 5e-05 is allowed"
    )
