"""The clock takes turns, fills its windows, and its intervals cover the median as often as they say."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from postlude.check.clock import (
    Calls,
    Estimate,
    Window,
    difference,
    interval_rank,
    ratio,
    rotating,
    time_interleaved,
)


class FakeClock:
    """Time that passes only when a variant says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []

    def __call__(self) -> float:
        return self.now

    def variant(self, name: str, seconds: Callable[[float], float]) -> Callable[[int], None]:
        def call(index: int) -> None:
            self.calls.append((name, index))
            self.now += seconds(self.now)

        return call


def test_time_per_call_and_ratio_are_exact_on_a_steady_machine() -> None:
    clock = FakeClock()
    variants = {
        "slow": clock.variant("slow", lambda _: 0.006),
        "fast": clock.variant("fast", lambda _: 0.002),
    }
    times = time_interleaved(variants, rounds=8, min_window_s=0.02, clock=clock)
    assert times["slow"].median == pytest.approx(0.006)
    assert times["fast"].median == pytest.approx(0.002)
    speedup = ratio(times["slow"], times["fast"])
    assert (speedup.median, speedup.low, speedup.high) == pytest.approx((3, 3, 3))


def test_paired_ratio_survives_a_machine_that_slows_down() -> None:
    clock = FakeClock()

    def drifting(seconds: float) -> Callable[[float], float]:
        return lambda now: seconds * (1 + 3 * now)  # everything takes longer and longer

    variants = {"a": clock.variant("a", drifting(0.02)), "b": clock.variant("b", drifting(0.01))}
    times = time_interleaved(variants, rounds=12, min_window_s=0.0, clock=clock)
    paired = ratio(times["a"], times["b"])
    assert paired.high - paired.low < 0.4
    assert 1.8 < paired.median < 2.2
    # The unpaired samples spread far more than that: pairing is what makes it narrow.
    assert max(times["a"].samples) / min(times["a"].samples) > 1.5


def test_rounds_rotate_who_goes_first() -> None:
    clock = FakeClock()
    variants = {name: clock.variant(name, lambda _: 1.0) for name in "abc"}
    time_interleaved(variants, rounds=3, min_window_s=0.5, warmup=0, clock=clock)
    timed = [name for name, _ in clock.calls[3:]]  # one call of each to calibrate
    assert "".join(timed) == "abcbcacab"


def test_windows_are_long_enough_and_indices_advance() -> None:
    clock = FakeClock()
    progress: list[str] = []
    variants = {"only": clock.variant("only", lambda _: 0.003)}
    times = time_interleaved(variants, rounds=2, min_window_s=0.1, warmup=1, clock=clock, progress=progress.append)
    assert len(times["only"].samples) == 2
    timed = [index for _, index in clock.calls][-68:]
    assert len(timed) >= 2 * 34
    assert timed == list(range(timed[0], timed[0] + len(timed)))
    assert progress == ["round 1 of 2", "round 2 of 2"]


def test_budget_stops_after_a_whole_round() -> None:
    clock = FakeClock()
    variants = {name: clock.variant(name, lambda _: 1.0) for name in "ab"}
    times = time_interleaved(variants, rounds=100, min_window_s=0.5, warmup=0, budget_s=9.0, clock=clock)
    counts = {len(timing.samples) for timing in times.values()}
    assert len(counts) == 1
    assert counts.pop() in (4, 5)


def test_real_clock_sees_a_real_difference() -> None:
    def work(loops: int) -> int:
        return sum(range(loops))

    variants = {"long": lambda _: work(400_000), "short": lambda _: work(2_000)}
    times = time_interleaved(variants, rounds=7, min_window_s=0.002)
    assert ratio(times["long"], times["short"]).low > 3  # two hundred, and room for a machine that others use


@pytest.mark.parametrize(
    ("count", "rank", "coverage"), [(5, 0, 0.9375), (6, 0, 0.96875), (9, 1, 0.9609), (20, 5, 0.9586)]
)
def test_interval_ranks_are_the_binomial_ones(count: int, rank: int, coverage: float) -> None:
    assert interval_rank(count) == (rank, pytest.approx(coverage, abs=1e-4))


def test_interval_covers_the_median_as_often_as_it_says() -> None:
    source = random.Random(0)
    true_median = 0.6931471805599453  # of the exponential distribution
    estimates = [Estimate.of([source.expovariate(1.0) for _ in range(20)]) for _ in range(2000)]
    covered = sum(e.low <= true_median <= e.high for e in estimates) / len(estimates)
    assert abs(covered - estimates[0].coverage) < 0.015
    # An interval two ranks narrower is seen to fail.
    narrow = sum(sorted(e.samples)[7] <= true_median <= sorted(e.samples)[12] for e in estimates) / len(estimates)
    assert narrow < 0.9


def test_quantiles_and_bad_calls() -> None:
    estimate = Estimate.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert [estimate.quantile(part) for part in (0.0, 0.2, 0.5, 0.8, 1.0)] == pytest.approx([1, 1.8, 3, 4.2, 5])
    assert estimate.samples == (5.0, 1.0, 2.0, 4.0, 3.0)
    with pytest.raises(ValueError, match="paired"):
        ratio(estimate, Estimate.of([1.0]))
    with pytest.raises(ValueError, match="no samples"):
        Estimate.of([])


def test_rotating_walks_through_its_inputs() -> None:
    seen: list[int] = []
    call = rotating(lambda a, b: seen.append(a + b), [(1, 0), (2, 0), (3, 0)])
    for index in range(5):
        call(index)
    assert seen == [1, 2, 3, 1, 2]
    with pytest.raises(ValueError, match="rotate"):
        rotating(print, [])


class Shrinking:
    """A contestant that is slow until it has been measured, and ten times as fast from then on."""

    def __init__(self) -> None:
        self.windows: list[Window] = []

    def window(self, first: int, calls: int, kept: int | None) -> Window:
        per_call = 0.01 if first < 20 else 0.001
        self.windows.append(Window(per_call * calls, calls))
        return self.windows[-1]


def test_a_window_that_is_too_short_does_not_count() -> None:
    contestant = Shrinking()
    counted: list[Window] = []
    times = time_interleaved(
        {"only": contestant}, rounds=5, min_window_s=0.05, on_window=lambda _, window: counted.append(window)
    )
    assert len(counted) == 5
    assert all(window.seconds >= 0.05 for window in counted)
    assert times["only"].median == pytest.approx(0.001)
    # Some window after the first that was long enough was too short, and was run again with more calls.
    long_enough = [window.seconds >= 0.05 for window in contestant.windows]
    assert False in long_enough[long_enough.index(True) :]


def test_results_of_random_calls_are_handed_over() -> None:
    clock = FakeClock()

    def call(index: int) -> int:
        clock.now += 0.001
        return index

    seen: list[Window] = []
    time_interleaved(
        {"only": Calls(call, clock)},
        rounds=200,
        min_window_s=0.01,
        on_window=lambda _, window: seen.append(window),
        clock=clock,
    )
    kept = [window for window in seen if window.index is not None]
    assert all(window.output == window.index for window in kept)
    assert 40 < len(kept) < 130
    places = {window.index % window.calls for window in kept if window.index is not None}
    assert len(places) > 8  # first, last and everything between


class FakeStopwatch:
    """Sees a part of the time."""

    def __init__(self, clock: FakeClock, part: float) -> None:
        self.clock, self.part = clock, part
        self.began = self.ended = 0.0

    def start(self) -> None:
        self.began = self.clock()

    def stop(self) -> None:
        self.ended = self.clock()

    def seconds(self) -> float:
        return self.part * (self.ended - self.began)


def test_the_second_clock_is_noted_beside_the_first() -> None:
    clock = FakeClock()
    call = Calls(clock.variant("a", lambda _: 0.25), clock, lambda: FakeStopwatch(clock, 0.5))
    window = call.window(0, 4)
    assert (window.seconds, window.event_seconds) == (1.0, 0.5)
    assert window.index is None


def test_differences_are_paired_and_refuse_what_is_hidden() -> None:
    whole, part = Estimate.of([3.0, 5.0, 4.0]), Estimate.of([1.0, 2.0, 1.5])
    left = difference(whole, part)
    assert left is not None
    assert left.samples == (2.0, 3.0, 2.5)
    assert difference(part, whole) is None
    with pytest.raises(ValueError, match="paired"):
        difference(whole, Estimate.of([1.0]))
