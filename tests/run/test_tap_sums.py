"""Sums of what each tap reads, and their gradient, in Triton's interpreter: against PyTorch's convolution, mutants."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cases import conv
from postlude import reference
from postlude.chain import Convolution
from postlude.stages import tap_sums
from postlude.stages.tap_sums import sums_by_tap, sums_gradient
from tracing import run_stage
from wrong_kernels import replace_text

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, at infinities
]
CASES: dict[str, tuple[Convolution, tuple[int, ...]]] = {
    "plain": (conv(2, (3, 4)), (2, 3, 6, 7)),
    "padded": (conv(2, (3, 4), padding=1), (2, 3, 5, 9)),
    "dilated": (dataclasses.replace(conv(2, (2, 3), padding=3), dilation=(2, 3)), (2, 2, 8, 9)),
    "3-D": (conv(3, (2, 3), padding=1), (2, 2, 3, 4, 5)),
    "upwards": (conv(2, (3, 4), transposed=True, stride=2, padding=1, output_padding=1), (2, 3, 5, 6)),
    "upwards, 3-D": (conv(3, (2, 3), 4, transposed=True, stride=2, padding=1), (1, 2, 3, 4, 5)),
    "upwards, one position": (conv(2, (2, 3), 4, transposed=True, stride=2, padding=3), (2, 2, 3, 3)),
    "more taps than positions": (conv(2, (2, 3), 5, padding=2), (2, 2, 2, 3)),
}


def sums_by_convolving(conv: Convolution, x: Tensor) -> Tensor:
    """A convolution of each channel alone whose output channels are its taps, summed over its positions."""
    taps = torch.eye(int(torch.tensor(conv.kernel).prod()), dtype=x.dtype).reshape(-1, 1, *conv.kernel)
    alone = dataclasses.replace(conv, in_channels=1, out_channels=taps.shape[0], has_bias=False)
    each = x.reshape(-1, 1, *x.shape[2:])
    found = reference.convolve(alone, each, taps.transpose(0, 1) if conv.transposed else taps, None)
    return found.flatten(2).sum(2).reshape(*x.shape[:2], -1)


def cut_into(monkeypatch: pytest.MonkeyPatch, widest: int, depth: int, programs: int) -> None:
    monkeypatch.setattr(tap_sums, "_WIDEST", widest)
    monkeypatch.setattr(tap_sums, "_BY_WARP", 4)
    monkeypatch.setattr(tap_sums, "_DEPTH", depth)
    monkeypatch.setattr(tap_sums, "_PROGRAMS", programs)
    monkeypatch.setattr(tap_sums, "_LEAST_TILES", 1)


@pytest.fixture(params=[(512, 8, 1), (4, 2, 4096), (4, 2, 1)], ids=["one tile", "chunks", "many tiles"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(monkeypatch, *request.param)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("cut")
def test_are_what_the_taps_read(name: str) -> None:
    conv, shape = CASES[name]
    x = torch.randn(shape) + 0.5
    (found,) = run_stage(lambda x: sums_by_tap(conv, x), x)
    torch.testing.assert_close(found, sums_by_convolving(conv, x.double()), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("cut")
def test_gradient_goes_to_what_the_taps_read(name: str) -> None:
    conv, shape = CASES[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    truth = sums_by_convolving(conv, x)
    dy = torch.randn(truth.shape, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(truth, x, dy)
    (found,) = run_stage(lambda dy, x: sums_gradient(conv, dy, x), dy, x.detach().float())
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)


def test_an_infinity_stays_in_its_taps() -> None:
    conv, shape = CASES["plain"]
    x = torch.randn(shape)
    x[0, 0, 0, 0], x[1, 2, 5, 6] = torch.inf, torch.nan
    (found,) = run_stage(lambda x: sums_by_tap(conv, x), x)
    assert found is not None
    assert found[0, 0].isinf().tolist() == [True] + [False] * 8
    assert found[1, 2].isnan().tolist() == [False] * 8 + [True]
    assert found.isfinite().sum() == found.numel() - 2


MUTANTS = {
    "one output less": ("(o >= 0) & (o < OUT)", "(o >= 0) & (o < OUT - 1)"),
    "a convolution for its transpose": ("if IS_CONV_TRANSPOSED else", "if not IS_CONV_TRANSPOSED else"),
    "taps along y and x exchanged": ("tap // KW, OH", "tap % KW, OH"),
    "slices of the next chunk": ("(first + SLICES_PER_PROGRAM, D)", "(first + SLICES_PER_PROGRAM + 1, D)"),
    "only the last tile": ("b_sum += tl.sum(", "b_sum = tl.sum("),
    "every slice for every tap": ("tl.where(m_z[:, :, None], b_x, 0.0)", "b_x + tl.where(m_z[:, :, None], 0.0, 0.0)"),
    "a tap twice": ("* (KH * KW) + k, mask=o_k < KD, other", "* (KH * KW) + 0 * k, mask=o_k < KD, other"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_text(monkeypatch, "tap_sums", *MUTANTS[name])
    cut_into(monkeypatch, 4, 2, 4096 if "chunk" in name else 1)
    with pytest.raises(AssertionError):  # noqa: PT012 (one of these sees it)
        for case in ("upwards", "upwards, 3-D"):
            test_are_what_the_taps_read(case)
            test_gradient_goes_to_what_the_taps_read(case)
