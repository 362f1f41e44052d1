"""Timing: variants take turns, so that whatever slows the machine down affects all of them.

The host's clock around whole windows of calls decides; CUDA events are recorded for comparison.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Variant = Callable[[int], object]
CONFIDENCE = 0.95
GROWTH = 10  # how much a calibrated window may grow at once
HEADROOM = 1.25  # calibrated windows are this much longer than the shortest that counts
CHECKED = 0.4  # the share of windows in which one call's result is kept and checked


@dataclass(frozen=True)
class Estimate:
    """A median with a distribution-free interval, which contains the true median with probability `coverage`."""

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


def interval_rank(count: int) -> tuple[int, float]:
    """How many samples to cut off at either end so that the rest still contains the median, and with what probability.

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
    """a / b, round by round: how many times faster b is. Paired, because both were timed in the same round."""
    if len(a.samples) != len(b.samples):
        raise ValueError(f"ratios are paired: {len(a.samples)} samples do not go with {len(b.samples)}")
    return Estimate.of([x / y for x, y in zip(a.samples, b.samples, strict=True)])


def difference(a: Estimate, b: Estimate) -> Estimate | None:
    """a − b, round by round; None if b is too large for the difference to mean anything."""
    if len(a.samples) != len(b.samples):
        raise ValueError(f"differences are paired: {len(a.samples)} samples do not go with {len(b.samples)}")
    samples = [x - y for x, y in zip(a.samples, b.samples, strict=True)]
    return Estimate.of(samples) if min(samples) > 0 else None


@dataclass(frozen=True)
class Window:
    """Consecutive calls, timed by our clock, and the result of one of them if requested."""

    seconds: float
    calls: int
    index: int | None = None  # of the call whose result is here
    output: object = None
    event_seconds: float | None = None  # the same window by the device's events, for information
    inputs: tuple[Any, ...] | None = None  # of the call whose result is here


class Contestant(Protocol):
    """Something that can be timed."""

    def window(self, first: int, calls: int, kept: int | None) -> Window:
        """Calls number `first` to `first + calls - 1`, with the result of call number `kept`."""


class Stopwatch(Protocol):
    """A second clock, which sees only the work between its start and stop."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> float: ...


class CudaEvents:
    """Events on the current stream; work on another stream is not between them."""

    def __init__(self) -> None:
        self.first, self.last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        self.first.record()

    def stop(self) -> None:
        self.last.record()

    def seconds(self) -> float:
        return float(self.first.elapsed_time(self.last)) / 1e3


@dataclass(frozen=True)
class Calls:
    """A function called in this process, inside the context `around`."""

    call: Variant
    clock: Callable[[], float] = time.perf_counter
    stopwatch: Callable[[], Stopwatch] | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def window(self, first: int, calls: int, kept: int | None = None) -> Window:
        output: object = None
        with self.around(), _uncollected():
            watch = None if self.stopwatch is None else self.stopwatch()
            _synchronize()
            start = self.clock()
            if watch is not None:
                watch.start()
            for index in range(first, first + calls):
                if index == kept:
                    output = self.call(index)
                else:
                    self.call(index)
            if watch is not None:
                watch.stop()
            _synchronize()
            seconds = self.clock() - start
        return Window(seconds, calls, kept, output, None if watch is None else watch.seconds())


def rotating(function: Callable[..., object], inputs: Sequence[Sequence[Any]]) -> Variant:
    """Calls `function` on the next set of inputs each time, so that no call finds its input in the cache."""
    if not inputs:
        raise ValueError("nothing to rotate through")
    return lambda index: function(*inputs[index % len(inputs)])


def time_interleaved(
    variants: Mapping[str, Variant | Contestant],
    *,
    rounds: int = 20,
    min_window_s: float = 0.1,
    warmup: int = 2,
    budget_s: float | None = None,
    progress: Callable[[str], None] | None = None,
    on_window: Callable[[str, Window], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Estimate]:
    """Seconds per call of each variant, one sample per round and variant.

    A sample is a window of repeated calls of at least `min_window_s`; each round starts with another variant.
    Only whole rounds count; when `budget_s` is spent, no new round begins. `on_window` sees every window that
    counts, some of them with the result of a call that was picked at random before the window began.
    """
    start = clock()
    running = {name: _Racer(_contestant(v, clock), min_window_s) for name, v in variants.items()}
    for one in running.values():
        one.prepare(warmup)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        if number and budget_s is not None and clock() - start > budget_s:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            window = running[name].timed(keeps=on_window is not None)
            samples[name].append(window.seconds / window.calls)
            if on_window is not None:
                on_window(name, window)
        if progress:
            progress(f"round {number + 1} of {rounds}")
    return {name: Estimate.of(times) for name, times in samples.items()}


class _Racer:
    """One contestant, how far through its inputs it is, and how many calls fill a window."""

    def __init__(self, contestant: Contestant, min_window_s: float) -> None:
        self.contestant = contestant
        self.min_window_s = min_window_s
        self.done = 0
        self.calls = 1
        self.random = random.SystemRandom()  # a candidate must not be able to predict which calls are checked

    def prepare(self, warmup: int) -> None:
        for _ in range(warmup):
            self._run(1)
        while (window := self._run(self.calls)).seconds < self.min_window_s:
            self._grow(window)
        # Only after a window that was long enough may the number of calls change a little.
        if window.seconds > 0:
            self.calls = max(self.calls, math.ceil(HEADROOM * self.min_window_s * self.calls / window.seconds))

    def timed(self, keeps: bool) -> Window:
        """A window of sufficient length; shorter ones are discarded."""
        while True:
            kept = self.done + self.random.randrange(self.calls) if keeps and self.random.random() < CHECKED else None
            window = self._run(self.calls, kept)
            if window.seconds >= self.min_window_s:
                return window
            self._grow(window)

    def _run(self, calls: int, kept: int | None = None) -> Window:
        window = self.contestant.window(self.done, calls, kept)
        self.done += calls
        return window

    def _grow(self, window: Window) -> None:
        seconds = window.seconds
        wanted = math.ceil(self.calls * HEADROOM * self.min_window_s / seconds) if seconds > 0 else self.calls * GROWTH
        self.calls = max(self.calls + 1, min(wanted, self.calls * GROWTH))


def _contestant(variant: Variant | Contestant, clock: Callable[[], float]) -> Contestant:
    return Calls(variant, clock) if callable(variant) else variant


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
