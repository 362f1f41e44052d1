"""The geometry of the plots. Templates draw it, so that every name goes through their escaping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from postlude.report import model, words

WIDTH, HEIGHT = 420.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 12.0, 40.0  # margins


@dataclass(frozen=True)
class Bar:
    """A bar with an interval; places are percent of the chart's width."""

    name: str
    label: str
    end: float
    low: float
    high: float
    kind: str


@dataclass(frozen=True)
class Bars:
    bars: tuple[Bar, ...]
    one: float  # where the ratio is 1


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Mark:
    x: float
    y: float
    name: str
    label: str
    kind: str


@dataclass(frozen=True)
class Curve:
    points: str  # as SVG's polyline takes them
    name: str
    kind: str


@dataclass(frozen=True)
class Plot:
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...]
    limits: tuple[Mark, ...] = ()  # vertical lines: x and their name

    width, height = WIDTH, HEIGHT
    left, top, right, bottom = LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM


def kind_of(variant: str) -> str:
    """The CSS class that colours a variant; unknown names share one."""
    kinds = {model.EAGER: "eager", model.POSTLUDE: "postlude", model.CANDIDATE: "candidate"}
    return kinds.get(variant, "compile" if variant.startswith(model.COMPILE) else "baseline")


def speed_bars(race: model.Race) -> Bars | None:
    """Times as fast as eager; the axis begins at 0, so that lengths may be compared."""
    shown = [(entry.variant, entry.times_eager) for entry in race.entries if entry.times_eager is not None]
    if not shown:
        return None
    most = 1.04 * max(1.0, *(ratio.high for _, ratio in shown))
    return Bars(tuple(_bar(name, ratio, 100 / most) for name, ratio in shown), round(100 / most, 2))


def _bar(name: str, ratio: model.Interval, unit: float) -> Bar:
    end, low, high = (round(unit * number, 2) for number in (ratio.median, ratio.low, ratio.high))
    return Bar(name, words.times_in_range(ratio), end, low, high, kind_of(name))


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis from 10^low to 10^high over the pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def place(self, power: float) -> float:
        part = (power - self.low) / (self.high - self.low)
        return round(self.start + min(max(part, 0.0), 1.0) * (self.end - self.start), 1)

    def ticks(self, unit: str = "") -> tuple[Tick, ...]:
        step = max(1, round((self.high - self.low) / 6))
        powers = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1, step)
        return tuple(Tick(self.place(power), _power(power, unit)) for power in powers)


def roofline(data: model.Roofline) -> Plot:
    """Operations per second over operations per byte, both logarithmic, under the machine's measured roof."""
    ridge = math.log10(data.operations_per_second / data.bytes_per_second)
    here = math.log10(max(data.operations, 1) / data.bytes)
    speeds = [math.log10(max(data.operations, 1) / point.seconds) for point in data.points]
    peak = math.log10(data.operations_per_second)
    x = _Axis(math.floor(min(ridge, here) - 1), math.ceil(max(ridge, here) + 1), LEFT, WIDTH - RIGHT)
    lowest = min([*speeds, peak - 1])
    y = _Axis(math.floor(lowest), math.ceil(max([peak, *speeds]) + 0.2), HEIGHT - BOTTOM, TOP)
    slope = math.log10(data.bytes_per_second)
    # The slanted part of the roof begins where it enters the plot, from below or from the left.
    start = max(x.low, y.low - slope)
    corners = [(start, start + slope), (ridge, peak), (x.high, peak)]
    roof = Curve(_points([(x.place(a), y.place(b)) for a, b in corners]), "roof", "roof")
    marks = [
        Mark(
            x.place(here),
            y.place(speed),
            point.variant,
            f"{point.variant}: {words.rate(data.operations / point.seconds, 'FLOP/s')}, {words.percent(point.share)}",
            kind_of(point.variant),
        )
        for point, speed in zip(data.points, speeds, strict=True)
    ]
    return Plot(x.ticks(), y.ticks("FLOP/s"), (roof,), tuple(marks))


def histogram(found: Sequence[model.Histogram], allowed: model.Errors | None) -> Plot | None:
    """The share of elements by the size of their error, and where the budget ends."""
    shown = [one for one in found if sum(one.counts)]
    if not shown:
        return None
    limits = [] if allowed is None else [(allowed.rms, "allowed RMS"), (allowed.worst, "allowed worst")]
    powers = [math.log10(value) for value, _ in limits if value > 0 and math.isfinite(value)]
    edges = [edge for one in shown for edge in (one.edges[0], one.edges[-1])]
    x = _Axis(math.floor(min(edges + powers)), math.ceil(max(edges + powers) + 0.1), LEFT, WIDTH - RIGHT)
    shares = [[count / max(1, sum(one.counts) + one.exact) for count in one.counts] for one in shown]
    most = max(max(share) for share in shares)
    top, bottom = TOP, HEIGHT - BOTTOM

    def y(share: float) -> float:
        return round(bottom - (bottom - top) * share / (1.1 * most), 1)

    curves = []
    for one, share in zip(shown, shares, strict=True):
        steps = [(x.place(one.edges[0]), bottom)]
        for left, right, part in zip(one.edges, one.edges[1:], share, strict=False):
            steps += [(x.place(left), y(part)), (x.place(right), y(part))]
        steps.append((x.place(one.edges[-1]), bottom))
        curves.append(Curve(_points(steps), one.variant, kind_of(one.variant)))
    lines = [
        Mark(x.place(math.log10(value)), top, name, f"{name} {words.error(value)}", "limit")
        for value, name in limits
        if value > 0 and math.isfinite(value)
    ]
    y_ticks = tuple(Tick(y(part * most), words.percent(part * most)) for part in (0.0, 0.5, 1.0))
    return Plot(x.ticks(), y_ticks, tuple(curves), (), tuple(lines))


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)


def _power(power: int, unit: str) -> str:
    if unit and 6 <= power <= 17:
        letter, least = next(pair for pair in (("P", 15), ("T", 12), ("G", 9), ("M", 6)) if power >= pair[1])
        return f"{10 ** (power - least)} {letter}"
    digits = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"
