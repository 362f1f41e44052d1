"""How the errors of a result are distributed, and whether a timed result belongs to its input."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from postlude.check.deviations import blocks_of

BINS_PER_DECADE = 4
SMALLEST = 1e-12  # smaller errors share the first bin
# How much a timed result may differ from PyTorch's own, in RMS relative to the spread of the latter: more than rounding
# causes, far less than a lower precision or another input would.
CLOSE = {"fp32": 5e-5, "tf32": 5e-3, "fp16": 2e-2, "bf16": 1e-1}
TELLING = 0.1  # of the size: rounding grows with the size, so a result with less spread is measured by its size


@dataclass(frozen=True)
class Distribution:
    """Counts of elements by log10 of their error, relative to the spread of the truth."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    exact: int
    worst: float


def distribution(result: Tensor, truth: Tensor) -> Distribution | None:
    """The distribution of a result's errors, without non-finite elements; None if the truth is constant or the shapes
    differ."""
    if result.shape != truth.shape or truth.numel() < 2:
        return None
    spread = float(truth.double().std())
    if not spread > 0:
        return None
    errors = (result.to(truth.device).double() - truth.double()).abs().reshape(-1) / spread
    errors = errors[torch.isfinite(errors)]
    exact, rest = int((errors == 0).sum()), errors[errors > 0].clamp(min=SMALLEST)
    if not rest.numel():
        return Distribution((), (), exact, 0.0)
    places = torch.floor(rest.log10() * BINS_PER_DECADE).to(torch.int64)
    first, last = int(places.min()), int(places.max())
    counts = torch.bincount(places - first, minlength=last - first + 1)
    edges = tuple(place / BINS_PER_DECADE for place in range(first, last + 2))
    return Distribution(edges, tuple(int(count) for count in counts), exact, float(rest.max()))


def belongs(result: object, expected: Tensor, mode: str, allowed: float = 0.0) -> str | None:
    """None where `result` is what PyTorch computes from the same input, else what is wrong with it."""
    if not isinstance(result, Tensor):
        return f"is a {type(result).__name__}, not a tensor"
    if result.shape != expected.shape:
        return f"has shape {tuple(result.shape)}, it should be {tuple(expected.shape)}"
    if not expected.numel():
        return None
    pairs = blocks_of(result.detach().to(expected.device), expected)
    strays, count, total, wrong = torch.stack([_sums(*pair) for pair in pairs]).sum(0).tolist()
    if strays:
        return "has NaN or infinite values where PyTorch has none"
    if not count:
        return None
    mean, error = total / count, math.sqrt(wrong / count)
    apart = float(torch.stack([_squares(theirs, mean) for (theirs,) in blocks_of(expected)]).sum())
    size, spread = math.hypot(mean, math.sqrt(apart / count)), math.sqrt(apart / max(count - 1, 1))
    scale = spread if spread > TELLING * size else size
    limit = max(CLOSE.get(mode, CLOSE["fp32"]), allowed)
    if error <= limit * scale or (scale == 0 and error == 0):
        return None
    relative = error / scale if scale > 0 else math.inf
    return f"differs from PyTorch's by {relative:.2g} of the spread, {limit:.2g} is allowed"


def _sums(ours: Tensor, theirs: Tensor) -> Tensor:
    """For one block: how many elements are finite on one side only, how many on PyTorch's, their sum there, and the
    squared errors there."""
    finite = torch.isfinite(theirs)
    strays = (finite != torch.isfinite(ours)).sum()
    total, wrong = (torch.where(finite, one, 0.0) for one in (theirs, ours - theirs))
    return torch.stack([strays, finite.sum(), total.sum(), wrong.square().sum()])


def _squares(theirs: Tensor, mean: float) -> Tensor:
    return torch.where(torch.isfinite(theirs), theirs - mean, 0.0).square().sum()
