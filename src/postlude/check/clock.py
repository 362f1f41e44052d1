"""Timing that can be believed: variants take turns, so that whatever slows the machine slows all of them."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Variant = Callable[[int], object]
CONFIDENCE = 0.95
GROWTH = 10  # how much a calibrated window may grow at once


@dataclass(frozen=True)
class Estimate:
    """A median with a distribution-free interval; `coverage` is how surely it holds the true median."""

    median: float
    low: float
    high: float
    coverage: float
    samples: tuple[float, ...]

    @staticmethod
    def of(samples: Sequence[float]) -> Estimate:
        if not samples:
            raise ValueError("no samples to estimate from")
        ordered = sorted(samples)
        rank, coverage = interval_rank(len(ordered))
        return Estimate(
            statistics.median(ordered),
            ordered[rank],
            ordered[len(ordered) - 1 - rank],
            coverage,
            tuple(samples),
        )

    def quantile(self, part: float) -> float:
        """The sample below which `part` of the samples lie, between neighbours by linear interpolation."""
        ordered = sorted(self.samples)
        place = part * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])


Timing = Estimate  # seconds per call, one sample per round


def interval_rank(count: int) -> tuple[int, float]:
    """How many samples to cut off at either end so that the rest still covers the median, and how surely.

    A sample is below the median with probability 1/2, so the number below it is binomial, whatever the
    distribution. Fewer than six samples cannot reach 95 %; their whole range is then the interval.
    """
    outside, rank = 0.0, 0
    for cut in range((count + 1) // 2):
        # Cutting `cut` samples misses the median when at most `cut` lie below it, or at most `cut` above it.
        missed = outside + 2.0 * math.comb(count, cut) / 2.0**count
        if cut and 1.0 - missed < CONFIDENCE:
            break
        outside, rank = missed, cut
    return rank, max(0.0, 1.0 - outside)


def ratio(a: Estimate, b: Estimate) -> Estimate:
    """a / b, round by round: how many times faster b is. Paired, since both were timed in the same round."""
    if len(a.samples) != len(b.samples):
        raise ValueError(f"ratios are paired: {len(a.samples)} samples do not go with {len(b.samples)}")
    return Estimate.of([x / y for x, y in zip(a.samples, b.samples, strict=True)])


def rotating(function: Callable[..., object], inputs: Sequence[Sequence[Any]]) -> Variant:
    """`function` on the next set of inputs at each call, so that no call finds its own input in the cache."""
    if not inputs:
        raise ValueError("nothing to rotate through")
    return lambda index: function(*inputs[index % len(inputs)])


def time_interleaved(
    variants: Mapping[str, Variant],
    *,
    rounds: int = 20,
    min_window_s: float = 0.1,
    warmup: int = 2,
    budget_s: float | None = None,
    progress: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Seconds per call of each variant, one sample per round and variant.

    A sample is a window of repeated calls, long enough for the clock; each round starts with another variant.
    Only whole rounds count; when `budget_s` is spent, no new round begins.
    """
    start = clock()
    counters = dict.fromkeys(variants, 0)
    calls = {}
    for name, variant in variants.items():
        for _ in range(warmup):
            counters[name] += _window(variant, counters[name], 1, clock)[0]
        calls[name] = _calibrate(variant, min_window_s, clock)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        if number and budget_s is not None and clock() - start > budget_s:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            done, seconds = _window(variants[name], counters[name], calls[name], clock)
            counters[name] += done
            samples[name].append(seconds / done)
        if progress:
            progress(f"round {number + 1} of {rounds}")
    return {name: Estimate.of(times) for name, times in samples.items()}


def _calibrate(variant: Variant, min_window_s: float, clock: Callable[[], float]) -> int:
    calls = 1
    while True:
        _, seconds = _window(variant, 0, calls, clock)
        if seconds >= min_window_s:
            return calls
        wanted = math.ceil(calls * 1.1 * min_window_s / seconds) if seconds > 0 else calls * GROWTH
        calls = max(calls + 1, min(wanted, calls * GROWTH))


def _window(variant: Variant, first: int, calls: int, clock: Callable[[], float]) -> tuple[int, float]:
    """`calls` calls and the time they took together, the device idle before and after."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        _synchronize()
        start = clock()
        for index in range(first, first + calls):
            variant(index)
        _synchronize()
        return calls, clock() - start
    finally:
        if collecting:
            gc.enable()


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
