"""Whether a point has values on both sides of every bound in a reference: those of clamps, the zero of relu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from postlude.check.interception import Interception
from postlude.check.operator_bounds import Given, bounds_of

# Least share of values on each side of a bound.
ENOUGH = 0.002
FEW = (0.0005, 0.03)
NAMED = 3
_COMPARING = ("gt", "ge", "lt", "le", "minimum", "maximum")


@dataclass(frozen=True)
class Bound:
    """One bound of one operator call."""

    operator: str
    call: int  # tells two calls of one operator apart
    value: float

    def __str__(self) -> str:
        return f"{self.operator} at {self.value:g}"


def _values_of_bounds(operator: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[float, ...]:
    if operator not in _COMPARING:
        return bounds_of(operator, Given(args, named))
    other = args[1]
    is_number = other.dim() == 0 if isinstance(other, Tensor) else type(other) in (int, float)
    return (float(other),) if is_number else ()


class BoundWatch(Interception):
    """Records every bound of a call, and the smaller of the two shares of values beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: dict[Bound, float] = {}
        self._sides: dict[Bound, tuple[float, float]] = {}
        self._calls = 0

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_")
        if args and isinstance(args[0], Tensor) and args[0].numel() and not args[0].is_complex():
            values = args[0].detach()
            for value in _values_of_bounds(name, args, kwargs):
                below, above = (float(part.double().mean()) for part in (values < value, values > value))
                bound = Bound(name, self._calls, value)
                self.shares[bound], self._sides[bound] = min(below, above), (below, above)
            self._calls += 1
        return func(*args, **kwargs)

    @property
    def reached(self) -> set[Bound]:
        return {bound for bound, share in self.shares.items() if share >= ENOUGH}

    def has_few(self, above: bool) -> bool:
        """Whether few values lie above the lowest bound of some operator, or below its highest; bounds at zero
        aside."""
        outermost: dict[int, Bound] = {}
        for bound in sorted(self._sides, key=lambda bound: bound.value, reverse=above):
            if bound.value:
                outermost[bound.call] = bound
        return any(FEW[0] <= self._sides[bound][int(above)] <= FEW[1] for bound in outermost.values())


def listed(bounds: set[Bound]) -> str:
    names = sorted({str(bound) for bound in bounds})
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
