"""How far results are from the truth, and how large the truth is: the measuring of a check, without any judging."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from postlude.check.verdict import NONE, Errors
from postlude.errors import PostludeError

TOLERANCE = 1e-5  # atol and rtol of the strict fp32 rule
# Elements compared at a time. On a GPU the float64 copies stay small. On a CPU they stay in cache, below the size from
# which the C library maps memory anew for each, and below the 32768 from which PyTorch uses threads: a scale takes 6 ns
# an element instead of 41, and beside busy processes threads wait for those that are not scheduled.
BLOCK = {"cuda": 1 << 22, "cpu": (1 << 15) - 1}
EXPONENT = 0x7FF << 52  # the bits of a float64 that leave the largest power of two below it


class MismatchError(PostludeError):
    """A result that cannot be compared with the truth because its shape differs."""


@dataclass(frozen=True)
class Deviation:
    """Absolute error against the truth; infinite if non-finite values differ from the truth's."""

    errors: Errors
    nearness: float  # the largest error relative to what allclose allows there; up to 1 it passes

    @property
    def allclose(self) -> bool:
        return self.nearness <= 1


@dataclass(frozen=True)
class Scale:
    """How large and how spread out a truth's finite values are, and the ulp of the output's dtype there."""

    count: int
    mean: float
    spread: float
    ulp: Errors
    eps: float

    @property
    def rms(self) -> float:
        return math.hypot(self.mean, self.spread)


def deviation(result: Tensor, truth: Tensor) -> Deviation:
    return deviations([result], truth)[0]


def deviations(results: Sequence[Tensor], truth: Tensor) -> list[Deviation]:
    """The deviation of each result, all measured together.

    Most quantities of a check are small and have up to eight results: PyTorch's, the candidate's, null candidates. One
    at a time, each is fifteen launches and a wait for the GPU, which took 6 of the 10 s of nnU-Net's checks.
    """
    for result in results:
        if result.shape != truth.shape:
            raise MismatchError(f"the result has shape {tuple(result.shape)}, it should be {tuple(truth.shape)}")
    if not results or not truth.numel():
        return [Deviation(NONE, 0.0) for _ in results]
    moved = [result.to(truth.device) for result in results]
    parts = [_finite_part(torch.stack(ours), true) for true, *ours in blocks_of(truth, *moved)]
    squares, worst, nearness = torch.stack(parts).unbind(1)  # each [blocks, results]
    found = torch.stack([squares.sum(0), worst.amax(0), nearness.amax(0)], 1).tolist()  # the host waits only here
    return [
        Deviation(Errors(math.sqrt(square / truth.numel()), largest), near)
        if math.isfinite(square)
        else _with_nonfinite(result, truth)
        for (square, largest, near), result in zip(found, moved, strict=True)
    ]


def _finite_part(ours: Tensor, true: Tensor) -> Tensor:
    """For one block of results [results, elements]: squared error, worst error and nearness, [3, results]. The first is
    not finite if any element is not."""
    error = (ours - true).abs_()
    squares = torch.linalg.vector_norm(error, dim=1).square()
    return torch.stack([squares, error.amax(1), error.div_(TOLERANCE + TOLERANCE * true.abs()).amax(1)])


def _with_nonfinite(result: Tensor, truth: Tensor) -> Deviation:
    found = [_compared(ours, true) for ours, true in blocks_of(result, truth)]
    squares, worst, strays, nearness, count = _on_host(torch.stack(found), largest=(1, 3))
    if strays:
        return Deviation(Errors(math.inf, math.inf), math.inf)
    return Deviation(Errors(math.sqrt(squares / max(count, 1)), worst), nearness)


def _compared(ours: Tensor, true: Tensor) -> Tensor:
    """For one block: squared error, worst error, mismatches among the non-finite, nearness, number of finite
    elements."""
    finite = torch.isfinite(true)
    agrees = torch.where(finite, torch.isfinite(ours), (ours == true) | (ours.isnan() & true.isnan()))
    error = torch.where(finite & agrees, (ours - true).abs(), 0.0)
    nearness = torch.where(finite, error / (TOLERANCE + TOLERANCE * true.abs()), 0.0)
    return torch.stack([error.square().sum(), error.max(), (~agrees).sum(), nearness.max(), finite.sum()])


def _on_host(parts: Tensor, largest: tuple[int, ...]) -> list[float]:
    """The sum of each column of a table; for the columns `largest`, the maximum."""
    columns = [column.max() if place in largest else column.sum() for place, column in enumerate(parts.unbind(1))]
    return [float(one) for one in torch.stack(columns).tolist()]


def scale_of(truth: Tensor, dtype: torch.dtype) -> Scale:
    """The scale of a truth whose results come in `dtype`."""
    info = torch.finfo(dtype)
    blocks = [block for (block,) in blocks_of(truth)]
    if not blocks:
        return Scale(0, 0.0, 0.0, Errors(0.0, 0.0), info.eps)
    parts = torch.stack([_measured(block, info) for block in blocks])
    centre = parts[:, 1].sum() / parts[:, 0].sum().clamp(min=1)
    squares = [torch.where(torch.isfinite(one), one - centre, 0.0).square().sum() for one in blocks]
    table = torch.cat([parts, torch.stack(squares)[:, None]], 1)
    count, total, largest, ulp_squares, variance = _on_host(table, largest=(2,))
    if count == 0:
        return Scale(0, 0.0, 0.0, Errors(0.0, 0.0), info.eps)
    worst_ulp = info.eps * 2.0 ** math.floor(math.log2(max(largest, info.tiny)))
    ulps = Errors(math.sqrt(ulp_squares / count), worst_ulp)
    return Scale(int(count), total / count, math.sqrt(variance / count), ulps, info.eps)


def _measured(block: Tensor, info: torch.finfo) -> Tensor:
    """For one block's finite elements: how many, their sum, the largest, their squared ulps."""
    finite = torch.isfinite(block)
    values = torch.where(finite, block, 0.0)
    magnitude = values.abs().clamp(min=info.tiny)
    ulp = (magnitude.view(torch.int64) & EXPONENT).view(torch.float64) * info.eps
    ulp_squares = torch.where(finite, ulp.square(), 0.0).sum()
    return torch.stack([finite.sum().double(), values.sum(), values.abs().max(), ulp_squares])


def blocks_of(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Flat pieces of equally many elements each, in float64: whole copies might not fit beside large results."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    size = max(1, BLOCK.get(flat[0].device.type, BLOCK["cpu"]) // len(flat))
    for start in range(0, flat[0].numel(), size):
        yield [one[start : start + size].double() for one in flat]
