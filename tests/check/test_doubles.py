"""Convolutions in float64 by other ways give PyTorch's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from postlude.check import doubles
from postlude.check.doubles import FastDoubles

CASES = {
    "padded": (False, (2, 3, 5, 6, 7), (4, 3, 3, 3, 3), (1, 1, 1)),
    "uneven": (False, (1, 2, 9, 8), (5, 2, 3, 2), (2, 0)),
    "transposed": (True, (2, 3, 4, 5, 6), (3, 4, 3, 3, 3), (0, 0, 0)),
    "transposed and padded": (True, (2, 3, 7, 8), (3, 5, 4, 3), (1, 2)),
}


def _all(transposed: bool, shape: tuple[int, ...], kernel: tuple[int, ...], padding: tuple[int, ...]) -> list[Tensor]:
    """The result and its three gradients."""
    torch.manual_seed(1)
    out = kernel[1] if transposed else kernel[0]
    leaves = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (shape, kernel, (out,))]
    ones, zeros = [1] * len(padding), [0] * len(padding)
    result = torch.convolution(*leaves, ones, list(padding), ones, transposed, zeros, 1)
    return [result, *torch.autograd.grad(result, leaves, torch.randn_like(result))]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [7, 4096])
def test_they_agree(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubles, "_CHUNK", chunk)
    taken: list[str] = []
    for word in ("as_forward", "gradients"):
        plain = getattr(doubles, word)
        monkeypatch.setattr(doubles, word, lambda *a, p=plain, w=word: taken.append(w) or p(*a))
    expected = _all(*CASES[name])
    with FastDoubles():
        found = _all(*CASES[name])
    assert "gradients" in taken
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_wrong_tap_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = doubles.by_taps
    monkeypatch.setattr(doubles, "by_taps", lambda x, dy, w, p: honest(x, dy, w, p).flip(2))
    with FastDoubles(), pytest.raises(AssertionError):
        torch.testing.assert_close(_all(*CASES["padded"])[2], _all(*CASES["uneven"])[2])
    expected = _all(*CASES["padded"])[2]
    with FastDoubles():
        assert not torch.allclose(_all(*CASES["padded"])[2], expected)


def test_others_are_left_to_pytorch() -> None:
    x, w = torch.randn(1, 2, 6, 6), torch.randn(2, 2, 3, 3)
    with FastDoubles():
        torch.testing.assert_close(torch.conv2d(x, w, stride=2), torch.conv2d(x, w, stride=2), rtol=0, atol=0)
