"""The error rule: how far a result may be from the float64 truth, and the verdict on it.

Errors are relative to the spread (standard deviation) of the truth. The budget of a precision mode is the
larger of PyTorch's own error in it and the error of the mode itself, plus 4 ulp of the output's dtype; a
result is right when its error, pooled over at least five points, is within 2 budgets by RMS and 4 by worst.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from postlude.check.deviations import TOLERANCE, Deviation, Scale
from postlude.check.draws import offset_for
from postlude.check.verdict import NONE, Errors, Judged, Outcome

RMS_FACTOR = 2.0
WORST_FACTOR = 4.0
ULPS = 4
MIN_POINTS = 5
EASILY = 0.5  # of what allclose allows: closer to the limit, it is luck which of two honest results passes
# With fewer elements than this a point's own spread means little, and the points of a pool share one.
FEW_ELEMENTS = 8
# A truth that varies by fewer ulp than this cannot tell a right result from a constant.
MIN_SPREAD_ULPS = 8


@dataclass(frozen=True)
class Measured:
    """One quantity at one test point: everything that judging needs to know about it; no tensors."""

    scale: Scale
    result: Deviation
    own: Deviation  # PyTorch's, in the same mode
    rounded: Deviation  # of the precision mode itself: operands rounded, the rest in float64
    nulls: Mapping[str, Errors] = field(default_factory=dict)
    floor: float = 0.0  # errors are relative to at least this; for gradients whose truth may be zero
    kinks: Errors = NONE  # the error that elements within rounding of a kink may add, if no cotangent spares them


def pooled(errors: Sequence[Errors], spreads: Sequence[float]) -> Errors:
    """Absolute errors divided by the spreads and pooled; every point has the same weight."""
    ratios = [error.rms / spread for error, spread in zip(errors, spreads, strict=True)]
    return Errors(
        math.hypot(*ratios) / math.sqrt(len(ratios)),  # hypot, because squares overflow beyond 1e154
        max(error.worst / s for error, s in zip(errors, spreads, strict=True)),
    )


def budget_of(points: Sequence[Measured], spreads: Sequence[float]) -> Errors:
    own = pooled([point.own.errors for point in points], spreads)
    mode = pooled([point.rounded.errors for point in points], spreads)
    ulp = pooled([_ulp(point) for point in points], spreads)
    kinks = pooled([point.kinks for point in points], spreads)
    return Errors(
        max(own.rms, mode.rms) + kinks.rms + ULPS * ulp.rms,
        max(own.worst, mode.worst) + kinks.worst + ULPS * ulp.worst,
    )


def within(errors: Errors, budget: Errors) -> bool:
    return errors.rms <= RMS_FACTOR * budget.rms and errors.worst <= WORST_FACTOR * budget.worst


def nulls_rejected(points: Sequence[Measured], spreads: Sequence[float], budget: Errors) -> dict[str, bool]:
    """Null candidate → whether these points and this budget reject it."""
    names = dict.fromkeys(name for point in points for name in point.nulls)
    rejected = {}
    for name in names:
        having = [(p.nulls[name], spread) for p, spread in zip(points, spreads, strict=True) if name in p.nulls]
        rejected[name] = not within(pooled([error for error, _ in having], [s for _, s in having]), budget)
    return rejected


def judge(
    name: str,
    points: Sequence[Measured],
    *,
    strict: bool = False,
    slack: float = 1.0,
    least: int = MIN_POINTS,
    offset: float = 0.0,
) -> Judged:
    """The verdict on one quantity; `strict` adds the allclose rule, `slack` widens the budget.

    With inputs that are `offset` spreads away from zero, one rounding of an intermediate of that size is allowed, also
    where PyTorch has none: cancellation, which such points are to find, grows with the square of the offset.
    """
    spreads = spreads_of(points)
    usable = [(point, spread) for point, spread in zip(points, spreads, strict=True) if not is_constant(point, spread)]
    refused = len(points) - len(usable)
    if len(usable) < least:
        return Judged(name, *_too_few(name, points, refused), points=len(points), refused=refused)
    points, spreads = [point for point, _ in usable], [spread for _, spread in usable]
    errors = pooled([point.result.errors for point in points], spreads)
    budget = budget_of(points, spreads).times(slack)
    rounding = max(offset_for(point.scale.eps, offset) * point.scale.eps / 2 for point in points)
    budget = Errors(max(budget.rms, rounding), max(budget.worst, rounding))
    rejected = nulls_rejected(points, spreads, budget)
    outcome, reasons = _outcome(name, points, errors, budget, rejected, strict)
    own, mode = (pooled([getattr(p, what).errors for p in points], spreads) for what in ("own", "rounded"))
    passing = tuple(null for null, is_rejected in rejected.items() if not is_rejected)
    return Judged(name, outcome, reasons, errors, budget, own, mode, len(points), refused, passing)


def _outcome(
    name: str,
    points: Sequence[Measured],
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
        where = f"at {missed} point{'s' * (missed > 1)} where PyTorch passes it easily"
        reasons.append(f"{name}: misses allclose({TOLERANCE:g}) {where}")
    if reasons:
        return "wrong", tuple(reasons)
    passing = [null for null, is_rejected in rejected.items() if not is_rejected]
    # A gradient that the norm cancels is zero in truth: zeros are then right, not a sign of a weak test.
    cancelled = sum(point.scale.rms < point.floor for point in points) * 2 > len(points)
    if passing and not cancelled:
        return "cannot tell", (f"{name}: these points would also accept {', '.join(passing)}",)
    return "right", ()


def _too_few(name: str, points: Sequence[Measured], refused: int) -> tuple[Outcome, tuple[str, ...]]:
    if any(not math.isfinite(p.result.errors.worst) and math.isfinite(p.own.errors.worst) for p in points):
        return "wrong", (f"{name}: NaN or infinite values are not where the truth has them",)
    why = f"; {refused} refused because the truth there is nearly constant" if refused else ""
    return "cannot tell", (f"{name}: {len(points) - refused} usable points, {MIN_POINTS} are needed{why}",)


def spreads_of(points: Sequence[Measured]) -> list[float]:
    counted = [point.scale for point in points if point.scale.count]
    total = sum(scale.count for scale in counted)
    mean = sum(scale.count * scale.mean for scale in counted) / max(total, 1)
    parts = [math.sqrt(scale.count) * part for scale in counted for part in (scale.spread, scale.mean - mean)]
    shared = math.hypot(*parts) / math.sqrt(max(total, 1))
    return [max(shared if _shares_spread(point) else point.scale.spread, point.floor) for point in points]


def _shares_spread(point: Measured) -> bool:
    """Whether a point's own spread means little: that of few elements, or of a truth that PyTorch cannot tell from
    zero, as the mean of a normalized value with γ = 1 and β = 0."""
    is_faint = not point.floor and point.scale.rms < point.own.errors.rms < math.inf
    return 0 < point.scale.count < FEW_ELEMENTS or is_faint


def is_constant(point: Measured, spread: float) -> bool:
    """Whether a truth is constant. One below its dtype's smallest number counts too, as a saturated softmax's
    gradient."""
    return not spread > max(MIN_SPREAD_ULPS * point.scale.eps * point.scale.rms, point.scale.ulp.rms)


def _ulp(point: Measured) -> Errors:
    least = point.scale.eps * point.floor
    return Errors(max(point.scale.ulp.rms, least), max(point.scale.ulp.worst, least))
