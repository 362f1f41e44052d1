"""A time below the bytes that must move is a failure, one below the work a question, two clocks apart a finding."""

from __future__ import annotations

import pytest

from postlude.check.clock import Estimate
from postlude.check.floor import (
    Ceilings,
    Work,
    clocks_apart,
    holds,
    judge_times,
    question_about,
    too_fast,
    unbelievable,
)

MACHINE = Ceilings(bytes_per_second=1e12, operations_per_second=50e12)
WORK = Work(bytes=1_000_000_000, operations=100_000_000_000)  # 1 ms to move, 2 ms to compute


def _around(milliseconds: float) -> Estimate:
    return Estimate.of([1e-3 * milliseconds * part for part in (0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.03)])


@pytest.mark.parametrize(
    ("milliseconds", "fails", "asks"), [(0.9, True, True), (1.5, False, True), (2.5, False, False)]
)
def test_floor(milliseconds: float, fails: bool, asks: bool) -> None:
    timing = _around(milliseconds)
    assert (too_fast("x", timing, WORK, MACHINE) is not None) == fails
    assert (question_about("x", timing, WORK, MACHINE) is not None) == asks


def test_an_interval_that_reaches_the_floor_is_no_failure() -> None:
    assert too_fast("x", Estimate.of([0.9e-3, 0.95e-3, 1.01e-3]), WORK, MACHINE) is None


def test_the_sentences_say_what_was_measured() -> None:
    sentence = too_fast("candidate", _around(0.5), WORK, MACHINE)
    assert sentence is not None
    assert all(part in sentence for part in ("candidate takes 0.5 ms", "1e+03 MB", "1 ms", "does not do the work"))
    question = question_about("postlude", _around(1.0), WORK, MACHINE)
    assert question is not None
    assert "100 TFLOP/s" in question
    assert question.endswith("?")


def test_the_floor_says_nothing_where_pytorch_is_below_it() -> None:
    slow, fast = _around(3.0), _around(0.5)
    failures, questions = judge_times({"eager": slow, "candidate": fast}, "eager", WORK, MACHINE)
    assert set(failures) == {"candidate"}
    assert len(questions) == 1
    assert not holds(fast, WORK, MACHINE)
    assert judge_times({"eager": fast, "candidate": fast}, "eager", WORK, MACHINE)[0] == {}


@pytest.mark.parametrize(("events", "apart"), [(1.0, False), (0.92, False), (1.08, False), (0.85, True), (1.2, True)])
def test_clocks(events: float, apart: bool) -> None:
    host = [0.05, 0.06, 0.055]
    sentence = clocks_apart("candidate", host, [events * one for one in host])
    assert (sentence is not None) == apart
    assert clocks_apart("candidate", [], []) is None


def test_share_and_floor() -> None:
    assert WORK.floor_seconds(MACHINE) == pytest.approx(2e-3)
    assert WORK.share(4e-3, MACHINE) == pytest.approx(0.5)
    assert Work(bytes=1_000_000_000, operations=0).floor_seconds(MACHINE) == pytest.approx(1e-3)


def test_the_faster_of_two_measurements_counts() -> None:
    assert Ceilings(1.0, 5.0).or_faster(Ceilings(2.0, 4.0)) == Ceilings(2.0, 5.0)


@pytest.mark.parametrize(
    ("milliseconds", "ours", "any_precision", "believed"),
    [
        (0.9, 4.0, 0.0, False),
        (1.1, 4.0, 0.0, True),  # less than twice as fast as the operations allow
        (0.9, 1.5, 0.0, True),  # a variant of our own is nearly as fast
        (0.9, 4.0, 300e12, True),  # half precision is fast enough
        (0.1, 4.0, 300e12, False),
    ],
)
def test_a_time_far_below_the_operations_is_not_believed(
    milliseconds: float, ours: float, any_precision: float, believed: bool
) -> None:
    machine = Ceilings(1e12, 50e12, any_precision)
    trusted = [_around(4.0), _around(ours)]
    sentence = unbelievable("candidate", _around(milliseconds), trusted, WORK, machine)
    assert (sentence is None) == believed
    assert believed or "the time of candidate cannot be believed: one call takes" in str(sentence)


def test_one_fast_window_of_pytorchs_is_enough_to_believe() -> None:
    """Beside other processes eager's other windows may have waited."""
    machine, slow = Ceilings(1e12, 50e12, 50e12), [4e-3] * 8
    assert unbelievable("candidate", _around(0.9), [Estimate.of(slow)], WORK, machine) is not None
    assert unbelievable("candidate", _around(0.9), [Estimate.of([*slow, 1.8e-3])], WORK, machine) is None
