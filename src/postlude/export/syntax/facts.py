"""What is known of the values in a kernel for one launch: shapes of blocks, bounds of whole numbers, and dtypes.

Bounds count only where arithmetic in the value's dtype does not overflow: a result that might is not bounded.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

Shape = tuple[int, ...]
WHOLE, REAL = "whole", "real"  # dtypes of literals, which take the dtype of what they are combined with
UNBOUNDED = (-math.inf, math.inf)
_WIDTHS = {"int1": 1, "int32": 31, "int64": 63}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*_WIDTHS, *_FLOATS, "int8", "int16", "uint8", "uint16", "uint32", "uint64")


@dataclass(frozen=True)
class Fact:
    """Of a value, or of each element of a block. Truths are 0 and 1, and only whole numbers have bounds."""

    shape: Shape | None = None
    low: float = -math.inf
    high: float = math.inf
    dtype: str = ""  # "*float32" of a pointer

    @property
    def is_true(self) -> bool:
        return self.dtype == "int1" and self.low == self.high == 1

    @property
    def number(self) -> int | None:
        """The one number that it can be."""
        return int(self.low) if self.low == self.high else None

    @property
    def is_bounded(self) -> bool:
        return -math.inf < self.low and self.high < math.inf


def bounded(fact: Fact) -> Fact:
    """The fact, without bounds where its dtype could not hold them."""
    if fact.dtype == WHOLE:
        return fact
    most = 2.0 ** _WIDTHS.get(fact.dtype, 0)
    is_held = fact.dtype in _WIDTHS and -most <= fact.low and fact.high < most + (fact.dtype == "int1")
    return fact if is_held else replace(fact, low=-math.inf, high=math.inf)


def literal(value: object) -> Fact:
    if isinstance(value, bool):
        return Fact((), value, value, "int1")
    if isinstance(value, int):
        return Fact((), value, value, WHOLE)
    return Fact((), dtype=REAL) if isinstance(value, float) else Fact()


def broadcast(shapes: Sequence[Shape | None]) -> Shape | None:
    """The shape of an operation on blocks of these shapes; scalars fit all."""
    blocks = [shape for shape in shapes if shape != ()]
    if None in blocks or len({len(shape or ()) for shape in blocks}) > 1:
        return None
    sizes = [set(column) - {1} for column in zip(*(shape or () for shape in blocks))]
    return None if any(len(column) > 1 for column in sizes) else tuple(max(column, default=1) for column in sizes)


def promoted(one: str, other: str) -> str:
    """The dtype of an operation on two dtypes, as Triton has it."""
    if one == other:
        return one
    for a, b in ((one, other), (other, one)):
        if a.startswith("*") and b in (WHOLE, "int32", "int64"):
            return a
        if a == WHOLE and b in ("int32", "int64", REAL, *_FLOATS):
            return b
        if a == REAL and b in ("int32", "int64"):
            return "float32"
        if a in (REAL, "int32", "int64") and b in _FLOATS:
            return b
        if (a, b) in (("int32", "int64"), ("float16", "float32")):
            return b
    return ""


def joined(one: Fact, other: Fact) -> Fact:
    """What is known of a value that is one of two."""
    kinds = {one.dtype, other.dtype}
    dtype = one.dtype if len(kinds) == 1 else "int32" if kinds == {WHOLE, "int32"} else ""
    shape = one.shape if one.shape == other.shape else None
    return bounded(Fact(shape, min(one.low, other.low), max(one.high, other.high), dtype))


def all_promoted(facts: Sequence[Fact]) -> str:
    dtype = facts[0].dtype
    for fact in facts[1:]:
        dtype = promoted(dtype, fact.dtype)
    return dtype


def bounds_of(op: ast.operator, left: Fact, right: Fact) -> tuple[float, float]:
    """The bounds of an operation on bounded whole numbers."""
    a, b, c, d = (int(bound) for bound in (left.low, left.high, right.low, right.high))
    if isinstance(op, ast.Add):
        return a + c, b + d
    if isinstance(op, ast.Sub):
        return a - d, b - c
    if isinstance(op, ast.Mult):
        products = (a * c, a * d, b * c, b * d)
        return min(products), max(products)
    if a < 0 or c < 1:
        return UNBOUNDED  # the device rounds towards 0, Python rounds down
    if isinstance(op, ast.FloorDiv):
        return a // d, b // c
    if isinstance(op, ast.Mod):
        return (a, b) if b < c else (0, min(b, d - 1))
    return UNBOUNDED
