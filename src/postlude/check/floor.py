"""Which times are impossible or implausible, by a roofline measured on this machine.

A time below that of the compulsory bytes is a failure. A time below that of the declared operations raises a question,
because a candidate may have found a way to do less; where it is far below, the candidate is not believed. Pure logic on
numbers that were measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from postlude.check.clock import Estimate

DISAGREEMENT = 0.10  # between the host's clock and the device's events
BELIEVABLE = 2.0  # times as fast as the machine's highest rates allow, and as the fastest variant in our own process


@dataclass(frozen=True)
class Ceilings:
    """The highest rates that were just measured on this machine."""

    bytes_per_second: float  # copying or reading as many bytes as the problem has
    operations_per_second: float  # in a matrix product or convolution of the same precision
    in_any_precision: float = 0.0  # operations per second in the fastest arithmetic that this machine has

    def or_faster(self, other: Ceilings) -> Ceilings:
        return Ceilings(
            max(self.bytes_per_second, other.bytes_per_second),
            max(self.operations_per_second, other.operations_per_second),
            max(self.in_any_precision, other.in_any_precision),
        )


@dataclass(frozen=True)
class Work:
    """What one call must do."""

    bytes: int  # inputs and parameters read once, the result written once
    operations: int  # as PyTorch counts them for the original model

    def floor_seconds(self, ceilings: Ceilings) -> float:
        return max(self.bytes / ceilings.bytes_per_second, self.operations / ceilings.operations_per_second)

    def share(self, seconds: float, ceilings: Ceilings) -> float:
        """The share of the speed that the ceilings allow."""
        return self.floor_seconds(ceilings) / seconds


def too_fast(name: str, timing: Estimate, work: Work, ceilings: Ceilings) -> str | None:
    """A failure if even the upper end of the interval is below the time of the compulsory bytes, else None."""
    least = work.bytes / ceilings.bytes_per_second
    if timing.high >= least:
        return None
    return (
        f"{name} takes {1e3 * timing.median:.3g} ms, and to move the {work.bytes / 1e6:.3g} MB that it must read and "
        f"write takes this machine {1e3 * least:.3g} ms: it does not do the work"
    )


def question_about(name: str, timing: Estimate, work: Work, ceilings: Ceilings) -> str | None:
    """A question if the declared operations need a higher rate than was measured in that precision, else None."""
    least = work.operations / ceilings.operations_per_second
    if timing.high >= least or not work.operations:
        return None
    reached, peak = work.operations / timing.median, ceilings.operations_per_second
    return (
        f"{name} does the work of {work.operations / 1e9:.3g} GFLOP at {reached / 1e12:.3g} TFLOP/s, where a matrix "
        f"product or convolution in the same precision reached {peak / 1e12:.3g}: by which arithmetic or algorithm?"
    )


def unbelievable(
    name: str, timing: Estimate, trusted: Sequence[Estimate], work: Work, ceilings: Ceilings
) -> str | None:
    """Why nobody should believe the time, or None.

    fp32 from products in half precision is honest, so the fastest arithmetic counts. A variant in our own process that
    is as fast, by another algorithm, shows that the operations are not all needed. Its fastest window counts: on a busy
    machine most windows of one process may be slow while those of another are not.
    """
    peak = max(ceilings.operations_per_second, ceilings.in_any_precision)
    least = work.operations / peak
    if BELIEVABLE * timing.high >= min(least, *(min(one.samples) for one in trusted)):
        return None
    return (
        f"the time of {name} cannot be believed: one call takes {1e3 * timing.median:.3g} ms, and the "
        f"{work.operations / 1e9:.3g} GFLOP of the model take this machine {1e3 * least:.3g} ms at "
        f"{peak / 1e12:.3g} TFLOP/s, the highest speed that it reached in any precision"
    )


def clocks_apart(name: str, host: Sequence[float], events: Sequence[float]) -> str | None:
    """A finding if the two clocks differ by more than a tenth over the windows that both timed, else None."""
    if not host or len(host) != len(events):
        return None
    seen = sum(events) / sum(host)
    if abs(seen - 1) <= DISAGREEMENT:
        return None
    return (
        f"the host's clock and CUDA events differ by {abs(seen - 1):.0%} on {name}: events saw {seen:.0%} of the time, "
        "as they do where work runs on another stream or a timer was changed; the host's clock counts"
    )


def holds(eager: Estimate, work: Work, ceilings: Ceilings) -> bool:
    """Whether the floor is valid. If PyTorch itself is below it, not every byte has to move, and it means nothing."""
    return too_fast("eager", eager, work, ceilings) is None


def judge_times(
    timings: Mapping[str, Estimate], eager: str, work: Work, ceilings: Ceilings
) -> tuple[dict[str, str], list[str]]:
    """Variant → why its time is impossible; and the questions."""
    questions = [q for name, t in timings.items() if (q := question_about(name, t, work, ceilings)) is not None]
    if not holds(timings[eager], work, ceilings):
        return {}, questions
    found = {name: too_fast(name, timing, work, ceilings) for name, timing in timings.items()}
    return {name: sentence for name, sentence in found.items() if sentence is not None}, questions
