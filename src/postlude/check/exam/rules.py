"""What the user may choose about an examination."""

from __future__ import annotations

from dataclasses import dataclass

from postlude.check.budget import MIN_POINTS


@dataclass(frozen=True)
class Rules:
    precision: str = "auto"
    seeds: int = 5  # least number of points with random inputs, and of points with a large offset
    backward: bool = False
    seconds: float = 60.0  # after this only required points are started
    # The source of all random numbers. If a candidate knows it, it can bring its answers along.
    seed: int = 0
    declared_only: bool = False  # only the declared shapes and layouts
    least: int = MIN_POINTS  # points that a verdict needs
