"""What the user may choose about an examination."""

from __future__ import annotations

from dataclasses import dataclass

from postlude.check.budget import MIN_POINTS


@dataclass(frozen=True)
class Rules:
    precision: str = "auto"
    seeds: int = 5  # points of random inputs and of large offset, at the least
    backward: bool = False
    seconds: float = 60.0  # after this no point is begun that is not required
    # Where all random numbers come from. One that a candidate can know lets it bring its answers along.
    seed: int = 0
    declared_only: bool = False  # no other shapes and layouts than the declared ones
    least: int = MIN_POINTS  # points that a verdict takes
