"""The error rule: how far a result may be from the float64 truth, and the verdict on it.

Errors are relative to the spread (standard deviation) of the truth. The budget of a precision mode is the
larger of PyTorch's own error in it and the error of the mode itself, plus 4 ulp of the output's dtype; a
result is right when its error, pooled over at least five points, is within 2 budgets by RMS and 4 by worst.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from postlude.check.verdict import NONE, Errors, Judged, Outcome
from postlude.check.verdict import Verdict as Verdict
from postlude.check.verdict import combine as combine
from postlude.errors import PostludeError

RMS_FACTOR = 2.0
WORST_FACTOR = 4.0
ULPS = 4
MIN_POINTS = 5
TOLERANCE = 1e-5  # atol and rtol of the strict fp32 rule
EASILY = 0.5  # of what allclose allows: closer to the limit, it is luck which of two honest results passes
# With fewer elements than this a point's own spread means little, and the points of a pool share one.
FEW_ELEMENTS = 8
# A truth that varies by fewer ulp than this cannot tell a right result from a constant.
MIN_SPREAD_ULPS = 8
BLOCK = 1 << 22  # elements compared at a time, so that the float64 copies stay small


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


@dataclass(frozen=True)
class Point:
    """Everything that judging needs to know about one quantity at one test point; no tensors."""

    scale: Scale
    result: Deviation
    own: Deviation  # PyTorch's, in the same mode
    mode: Deviation  # of the precision itself: operands rounded, the rest in float64
    nulls: Mapping[str, Errors] = field(default_factory=dict)
    floor: float = 0.0  # errors are relative to at least this; for gradients whose truth may be zero
    kinks: Errors = NONE  # the error that elements within rounding of a kink may add, if no cotangent spares them


def deviation(result: Tensor, truth: Tensor) -> Deviation:
    if result.shape != truth.shape:
        raise MismatchError(f"the result has shape {tuple(result.shape)}, it should be {tuple(truth.shape)}")
    found = [_compared(ours, true) for ours, true in _blocks(result.to(truth.device), truth)]
    if not found:
        return Deviation(Errors(0.0, 0.0), 0.0)
    # Summed on the device: the host waits for one transfer only.
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
    blocks = [block for (block,) in _blocks(truth)]
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
    ulp = torch.ldexp(torch.full_like(magnitude, info.eps), torch.frexp(magnitude).exponent - 1)
    ulp_squares = torch.where(finite, ulp.square(), 0.0).sum()
    return torch.stack([finite.sum().double(), values.sum(), values.abs().max(), ulp_squares])


def pooled(errors: Sequence[Errors], spreads: Sequence[float]) -> Errors:
    """Absolute errors divided by the spreads and pooled; every point has the same weight."""
    squares = [(error.rms / spread) ** 2 for error, spread in zip(errors, spreads, strict=True)]
    return Errors(
        math.sqrt(sum(squares) / len(squares)),
        max(error.worst / s for error, s in zip(errors, spreads, strict=True)),
    )


def budget_of(points: Sequence[Point], spreads: Sequence[float]) -> Errors:
    own = pooled([point.own.errors for point in points], spreads)
    mode = pooled([point.mode.errors for point in points], spreads)
    ulp = pooled([_ulp(point) for point in points], spreads)
    kinks = pooled([point.kinks for point in points], spreads)
    return Errors(
        max(own.rms, mode.rms) + kinks.rms + ULPS * ulp.rms,
        max(own.worst, mode.worst) + kinks.worst + ULPS * ulp.worst,
    )


def within(errors: Errors, budget: Errors) -> bool:
    return errors.rms <= RMS_FACTOR * budget.rms and errors.worst <= WORST_FACTOR * budget.worst


def nulls_rejected(points: Sequence[Point], spreads: Sequence[float], budget: Errors) -> dict[str, bool]:
    """Null candidate → whether these points and this budget reject it."""
    names = dict.fromkeys(name for point in points for name in point.nulls)
    rejected = {}
    for name in names:
        having = [(p.nulls[name], spread) for p, spread in zip(points, spreads, strict=True) if name in p.nulls]
        rejected[name] = not within(pooled([error for error, _ in having], [s for _, s in having]), budget)
    return rejected


def judge(
    name: str, points: Sequence[Point], *, strict: bool = False, slack: float = 1.0, least: int = MIN_POINTS
) -> Judged:
    """The verdict on one quantity; `strict` adds the allclose rule, `slack` widens the budget."""
    spreads = spreads_of(points)
    usable = [(point, spread) for point, spread in zip(points, spreads, strict=True) if not is_constant(point, spread)]
    refused = len(points) - len(usable)
    if len(usable) < least:
        return Judged(name, *_too_few(name, points, refused), points=len(points), refused=refused)
    points, spreads = [point for point, _ in usable], [spread for _, spread in usable]
    errors = pooled([point.result.errors for point in points], spreads)
    budget = budget_of(points, spreads).times(slack)
    rejected = nulls_rejected(points, spreads, budget)
    outcome, reasons = _outcome(name, points, errors, budget, rejected, strict)
    own, mode = (pooled([getattr(p, what).errors for p in points], spreads) for what in ("own", "mode"))
    passing = tuple(null for null, is_rejected in rejected.items() if not is_rejected)
    return Judged(name, outcome, reasons, errors, budget, own, mode, len(points), refused, passing)


def _outcome(
    name: str,
    points: Sequence[Point],
    errors: Errors,
    budget: Errors,
    rejected: Mapping[str, bool],
    strict: bool,
) -> tuple[Outcome, tuple[str, ...]]:
    if not (math.isfinite(budget.rms) and math.isfinite(budget.worst)):
        return "cannot tell", (f"{name}: PyTorch itself is not finite where the truth is, or the reverse",)
    reasons = []
    if not math.isfinite(errors.worst):
        reasons.append(f"{name}: NaN or infinite values are not where the truth has them")
    else:
        for what, factor in (("rms", RMS_FACTOR), ("worst", WORST_FACTOR)):
            error, allowed = getattr(errors, what), getattr(budget, what)
            if error > factor * allowed:
                limit = factor * allowed
                reasons.append(f"{name}: {what} error {error:.2g} of the spread, allowed {limit:.2g}")
    missed = sum(point.own.nearness <= EASILY and not point.result.allclose for point in points)
    if strict and missed:
        reasons.append(f"{name}: misses allclose({TOLERANCE:g}) at {missed} points where PyTorch passes it easily")
    if reasons:
        return "wrong", tuple(reasons)
    passing = [null for null, is_rejected in rejected.items() if not is_rejected]
    # A gradient that the norm cancels is zero in truth: zeros are then right, not a sign of a weak test.
    cancelled = sum(point.scale.rms < point.floor for point in points) * 2 > len(points)
    if passing and not cancelled:
        return "cannot tell", (f"{name}: these points would also accept {', '.join(passing)}",)
    return "right", ()


def _too_few(name: str, points: Sequence[Point], refused: int) -> tuple[Outcome, tuple[str, ...]]:
    if any(not math.isfinite(p.result.errors.worst) and math.isfinite(p.own.errors.worst) for p in points):
        return "wrong", (f"{name}: NaN or infinite values are not where the truth has them",)
    why = f"; {refused} refused because the truth there is nearly constant" if refused else ""
    return "cannot tell", (f"{name}: {len(points) - refused} usable points, {MIN_POINTS} are needed{why}",)


def spreads_of(points: Sequence[Point]) -> list[float]:
    counted = [point.scale for point in points if point.scale.count]
    total = sum(scale.count for scale in counted)
    mean = sum(scale.count * scale.mean for scale in counted) / max(total, 1)
    squares = sum(scale.count * (scale.spread**2 + (scale.mean - mean) ** 2) for scale in counted)
    shared = math.sqrt(squares / max(total, 1))
    few = [0 < point.scale.count < FEW_ELEMENTS for point in points]
    return [max(shared if is_few else p.scale.spread, p.floor) for p, is_few in zip(points, few, strict=True)]


def is_constant(point: Point, spread: float) -> bool:
    """Whether a truth is constant. One below its dtype's smallest number counts too, as a saturated softmax's
    gradient."""
    return not spread > max(MIN_SPREAD_ULPS * point.scale.eps * point.scale.rms, point.scale.ulp.rms)


def _ulp(point: Point) -> Errors:
    least = point.scale.eps * point.floor
    return Errors(max(point.scale.ulp.rms, least), max(point.scale.ulp.worst, least))


def _blocks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), BLOCK):
        yield [one[start : start + BLOCK].double() for one in flat]
