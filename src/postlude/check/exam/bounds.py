"""The kinks of a reference (bounds of clamps and the like), and whether a point has values on both sides of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from postlude.check.interception import Interception

# Least share of values on each side of a bound.
ENOUGH = 0.002
FEW = (0.0005, 0.03)
NAMED = 3


@dataclass(frozen=True)
class Kink:
    """One bound of one operator call."""

    operator: str
    call: int  # tells two calls of one operator apart
    bound: float

    def __str__(self) -> str:
        return f"{self.operator} at {self.bound:g}"


def _numbers(*values: Any) -> list[float]:
    return [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def _compared(args: tuple[Any, ...]) -> list[float]:
    other = args[1] if len(args) > 1 else None
    if isinstance(other, Tensor):
        return [float(other)] if other.dim() == 0 else []
    return _numbers(other)


def _softplus(args: tuple[Any, ...]) -> list[float]:
    beta = args[1] if len(args) > 1 else 1.0
    threshold = args[2] if len(args) > 2 else 20.0
    return [threshold / beta]


def _symmetric(args: tuple[Any, ...]) -> list[float]:
    size = float(args[1]) if len(args) > 1 else 0.5
    return [-size, size]


# Operator → its bounds: numbers, or functions of its arguments.
_FIXED = {
    **{name: [0.0] for name in ("relu", "leaky_relu", "elu", "abs", "_prelu_kernel")},
    **{name: [-3.0, 3.0] for name in ("hardswish", "hardsigmoid")},
}
_GIVEN: dict[str, Callable[[tuple[Any, ...]], list[float]]] = {
    "clamp": lambda args: _numbers(*args[1:3]),
    "hardtanh": lambda args: _numbers(*(args[1:3] or (-1.0, 1.0))),
    "softplus": _softplus,
    **dict.fromkeys(("clamp_min", "clamp_max", "threshold"), lambda args: _numbers(args[1])),
    **dict.fromkeys(("hardshrink", "softshrink"), _symmetric),
    **dict.fromkeys(("gt", "ge", "lt", "le", "minimum", "maximum"), _compared),
}


def bounds_of(operator: str, args: tuple[Any, ...]) -> list[float]:
    return _FIXED[operator] if operator in _FIXED else _GIVEN[operator](args) if operator in _GIVEN else []


class KinkWatch(Interception):
    """Records every kink of a call, and the smaller of the two shares of values beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: dict[Kink, float] = {}
        self._sides: dict[Kink, tuple[float, float]] = {}
        self._calls = 0

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_")
        if args and isinstance(args[0], Tensor) and args[0].numel() and not args[0].is_complex():
            values = args[0].detach()
            for bound in bounds_of(name, tuple(args)):
                below, above = (float(part.double().mean()) for part in (values < bound, values > bound))
                kink = Kink(name, self._calls, bound)
                self.shares[kink], self._sides[kink] = min(below, above), (below, above)
            self._calls += 1
        return func(*args, **kwargs)

    @property
    def reached(self) -> set[Kink]:
        return {kink for kink, share in self.shares.items() if share >= ENOUGH}

    def has_few(self, above: bool) -> bool:
        """Whether few values lie above the lowest bound of some operator, or below its highest; bounds at zero
        aside."""
        outermost: dict[int, Kink] = {}
        for kink in sorted(self._sides, key=lambda kink: kink.bound, reverse=above):
            if kink.bound:
                outermost[kink.call] = kink
        return any(FEW[0] <= self._sides[kink][int(above)] <= FEW[1] for kink in outermost.values())


def listed(kinks: set[Kink]) -> str:
    names = sorted({str(kink) for kink in kinks})
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
