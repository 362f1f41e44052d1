"""The bounds of elementwise operators: the arguments at which they change over from one formula to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


class Given:
    """The arguments of a call, which may be given by place or by name."""

    def __init__(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._args, self._named = args, named

    def __call__(self, place: int, name: str, usual: Any = None) -> Any:
        return self._args[place] if len(self._args) > place else self._named.get(name, usual)


_BOUNDS: dict[str, Callable[[Given], tuple[Any, ...]]] = {
    **dict.fromkeys(("relu", "leaky_relu", "prelu", "_prelu_kernel", "abs", "elu", "selu"), lambda _: (0.0,)),
    **dict.fromkeys(("hardswish", "hardsigmoid"), lambda _: (-3.0, 3.0)),
    **dict.fromkeys(("hardshrink", "softshrink"), lambda given: (-given(1, "lambd", 0.5), given(1, "lambd", 0.5))),
    "relu6": lambda _: (0.0, 6.0),
    "threshold": lambda given: (given(1, "threshold"),),
    "clamp": lambda given: (given(1, "min"), given(2, "max")),
    "clamp_min": lambda given: (given(1, "min"),),
    "clamp_max": lambda given: (given(1, "max"),),
    "hardtanh": lambda given: (given(1, "min_val", -1.0), given(2, "max_val", 1.0)),
    "softplus": lambda given: (given(2, "threshold", 20.0) / given(1, "beta", 1.0),),
}


def bounds_of(operator: str, given: Given) -> tuple[float, ...]:
    """The bounds of one call that are finite numbers: those that are tensors or missing are left out."""
    found = _BOUNDS[operator](given) if operator in _BOUNDS else ()
    numbers = [float(one) for one in found if isinstance(one, (int, float)) and not isinstance(one, bool)]
    return tuple(number for number in numbers if math.isfinite(number))
