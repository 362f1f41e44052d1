"""What is known of an operation's result, from what is known of its operands."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from postlude.export.syntax.analysis import name_of
from postlude.export.syntax.facts import (
    DTYPES,
    REAL,
    UNBOUNDED,
    WHOLE,
    Fact,
    all_promoted,
    bounded,
    bounds_of,
    broadcast,
    literal,
    promoted,
)

_SAME = ("tl.reshape", "tl.view", "tl.broadcast_to", "tl.trans", "tl.permute")  # the same elements in another shape
_HINTS = ("tl.max_contiguous", "tl.max_constancy", "tl.multiple_of")  # the same value, with a promise to the compiler
_EACH = (
    "abs",
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "fma",
    "floor",
    "ceil",
    "div_rn",
    "sqrt_rn",
    "sin",
    "cos",
)
_NAMED = "dtype "  # before the dtype that a value, such as a parameter, names
_KEPT = ("float32", "float64", "int32", "int64")  # dtypes that sums and extremes keep
_COMPARED: dict[type[ast.cmpop], Callable[[Fact, Fact], bool]] = {
    ast.Lt: lambda a, b: a.high < b.low,
    ast.LtE: lambda a, b: a.high <= b.low,
    ast.Gt: lambda a, b: a.low > b.high,
    ast.GtE: lambda a, b: a.low >= b.high,
    ast.Eq: lambda a, b: a.number is not None and a.number == b.number,
    ast.NotEq: lambda a, b: a.high < b.low or a.low > b.high,
}
_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


class _Known(Protocol):
    """What the rules ask of the facts."""

    grid: Sequence[int]
    called: Callable[[str, tuple[Fact, ...]], tuple[Fact, ...]]

    def __call__(self, node: ast.expr) -> Fact: ...

    def name(self, word: str) -> Fact: ...


class Rules:
    def __init__(self, known: _Known) -> None:
        self.known = known

    def of(self, node: ast.expr) -> Fact:
        if isinstance(node, ast.Constant):
            return literal(node.value)
        if isinstance(node, ast.Name):
            return self.known.name(node.id)
        rule = getattr(self, f"_{type(node).__name__.lower()}", None)
        return rule(node) if rule is not None else Fact()

    def counted(self, node: ast.expr) -> Fact:
        """What a loop counts."""
        assert isinstance(node, ast.Call)
        first, end, step = ast.Constant(0), node.args[0], ast.Constant(1)
        if len(node.args) > 1:
            first, end, step = (*node.args, step)[:3]  # type: ignore[assignment]
        start, stop, by = map(self.known, (first, end, step))
        kinds = {start.dtype, stop.dtype, by.dtype}
        if not kinds <= {WHOLE, "int32"} or by.number is None or by.number < 1:
            return Fact((), dtype="int32" if kinds <= {WHOLE, "int32"} else "")
        high = stop.high - 1
        if start.number is not None and high < math.inf:
            high = start.low + max(high - start.low, 0) // by.number * by.number
        return bounded(Fact((), start.low, max(start.low, high), "int32"))

    def _binop(self, node: ast.BinOp) -> Fact:
        left, right = self.known(node.left), self.known(node.right)
        shape, dtype = broadcast((left.shape, right.shape)), promoted(left.dtype, right.dtype)
        if isinstance(node.op, ast.Div) and dtype in (WHOLE, "int32", "int64"):
            dtype = REAL if dtype == WHOLE else "float32"
        low, high = bounds_of(node.op, left, right) if left.is_bounded and right.is_bounded else UNBOUNDED
        if isinstance(node.op, ast.BitAnd) and dtype == "int1":
            low, high = min(left.low, right.low), min(left.high, right.high)
        if isinstance(node.op, ast.BitOr) and dtype == "int1":
            low, high = max(left.low, right.low), max(left.high, right.high)
        return Fact(shape, low, high, dtype)

    def _unaryop(self, node: ast.UnaryOp) -> Fact:
        inner = self.known(node.operand)
        if isinstance(node.op, ast.USub):
            return Fact(inner.shape, -inner.high, -inner.low, inner.dtype)
        if isinstance(node.op, ast.Invert | ast.Not) and inner.dtype == "int1" and inner.is_bounded:
            return replace(inner, low=1 - inner.high, high=1 - inner.low)
        return Fact(inner.shape)

    def _compare(self, node: ast.Compare) -> Fact:
        left, right = self.known(node.left), self.known(node.comparators[-1])
        shape = broadcast((left.shape, right.shape))
        holds, fails = _COMPARED.get(type(node.ops[0])), _OPPOSITE.get(type(node.ops[0]))
        low, high = 0, 1
        if len(node.ops) == 1 and holds is not None and fails is not None and left.is_bounded and right.is_bounded:
            low, high = int(holds(left, right)), 1 - int(_COMPARED[fails](left, right))
        return Fact(shape, low, high, "int1")

    def _ifexp(self, node: ast.IfExp) -> Fact:
        return self._either([self.known(node.body), self.known(node.orelse)])

    def _subscript(self, node: ast.Subscript) -> Fact:
        inner = self.known(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        is_kept = [isinstance(part, ast.Slice) for part in parts]
        if inner.shape is None or sum(is_kept) != len(inner.shape):
            return Fact()
        if not all(
            keeps or (isinstance(part, ast.Constant) and part.value is None) for keeps, part in zip(is_kept, parts)
        ):
            return Fact()
        sizes = iter(inner.shape)
        return replace(inner, shape=tuple(next(sizes) if keeps else 1 for keeps in is_kept))

    def _attribute(self, node: ast.Attribute) -> Fact:
        if name_of(node).startswith("tl.") and node.attr in DTYPES:
            return Fact((), dtype=f"{_NAMED}{node.attr}")
        inner = self.known(node.value) if node.attr == "T" else Fact()
        return inner if inner.shape is None else replace(inner, shape=inner.shape[::-1])

    def _call(self, node: ast.Call) -> Fact:
        name = name_of(node.func)
        owner, _, last = name.rpartition(".")
        rule = getattr(self, f"_tl_{last}", None) if owner == "tl" else None
        if rule is not None:
            return rule(node)  # type: ignore[no-any-return]
        if name in _SAME:
            return self._same(node, last)
        if name in _HINTS:
            return self.known(node.args[0])
        if owner == "tl" and last in _EACH:
            facts = [self.known(argument) for argument in node.args]
            return Fact(broadcast([fact.shape for fact in facts]), dtype=all_promoted(facts))
        if isinstance(node.func, ast.Attribute) and owner == "":
            return self._method(node, node.func)
        if name == "float":
            return Fact((), dtype=REAL)
        found = self.returned(node)
        return found[0] if len(found) == 1 else Fact()

    def returned(self, node: ast.Call) -> tuple[Fact, ...]:
        """What a device function returns, if it is known."""
        if not isinstance(node.func, ast.Name) or node.keywords:
            return ()
        return self.known.called(node.func.id, tuple(self.known(argument) for argument in node.args))

    def _method(self, node: ast.Call, function: ast.Attribute) -> Fact:
        inner = self.known(function.value)
        if function.attr == "to" and node.args:
            return self._cast(inner, node)
        if function.attr == "load" and inner.dtype.startswith("*"):  # of a descriptor: its block
            return Fact(inner.shape, dtype=inner.dtype[1:])
        return Fact()

    def _cast(self, inner: Fact, node: ast.Call) -> Fact:
        dtype = self.dtype(node.args[-1])
        is_whole = dtype in _KEPT and dtype.startswith("int") and inner.dtype in ("int1", WHOLE, "int32", "int64")
        bounds = (inner.low, inner.high) if is_whole and not node.keywords else UNBOUNDED
        return Fact(inner.shape, *bounds, dtype)

    def dtype(self, node: ast.expr) -> str:
        """The dtype that an expression names."""
        if isinstance(node, ast.Attribute) and node.attr == "dtype":
            return self.known(node.value).dtype
        named = self.known(node).dtype
        return named.removeprefix(_NAMED) if named.startswith(_NAMED) else ""

    def _same(self, node: ast.Call, last: str) -> Fact:
        inner = self.known(node.args[0])
        if last in ("trans", "permute"):
            order = self._sizes(node.args[1]) if len(node.args) == 2 else None
            if len(node.args) > 2 or inner.shape is None:
                return replace(inner, shape=None)
            axes = tuple(range(len(inner.shape)))[::-1] if len(node.args) == 1 else order
            shape = None if axes is None else tuple(inner.shape[axis] for axis in axes)
        else:
            shape = self._sizes(node.args[1]) if len(node.args) == 2 else None
        return replace(inner, shape=shape)

    def _sizes(self, node: ast.expr) -> tuple[int, ...] | None:
        if isinstance(node, ast.Attribute) and node.attr == "shape":
            return self.known(node.value).shape
        parts = node.elts if isinstance(node, ast.List | ast.Tuple) else []
        numbers = [self.known(part).number for part in parts]
        return None if None in numbers or not parts else tuple(number for number in numbers if number is not None)

    def _either(self, facts: Sequence[Fact]) -> Fact:
        low, high = min(fact.low for fact in facts), max(fact.high for fact in facts)
        return Fact(broadcast([fact.shape for fact in facts]), low, high, all_promoted(facts))

    # By Triton's names.

    def _tl_program_id(self, node: ast.Call) -> Fact:
        axis = self.known(node.args[0]).number
        is_known = axis is not None and axis < len(self.known.grid)
        return Fact((), 0, self.known.grid[axis] - 1 if is_known else math.inf, "int32")  # type: ignore[index]

    def _tl_arange(self, node: ast.Call) -> Fact:
        first, end = (self.known(argument).number for argument in node.args)
        if first is None or end is None:
            return Fact(dtype="int32")
        return Fact((end - first,), first, end - 1, "int32")

    def _tl_zeros(self, node: ast.Call) -> Fact:
        return self._filled(node, Fact((), 0, 0, WHOLE))

    def _tl_full(self, node: ast.Call) -> Fact:
        return self._filled(node, self.known(node.args[1]))

    def _filled(self, node: ast.Call, value: Fact) -> Fact:
        dtype = self.dtype(node.args[-1])
        bounds = (value.low, value.high) if dtype.startswith("int") else UNBOUNDED
        return Fact(self._sizes(node.args[0]), *bounds, dtype)

    def _tl_load(self, node: ast.Call) -> Fact:
        pointer = self.known(node.args[0])
        return Fact(pointer.shape, dtype=pointer.dtype[1:])

    def _tl_where(self, node: ast.Call) -> Fact:
        found = self._either([self.known(argument) for argument in node.args[1:]])
        return replace(found, shape=broadcast((self.known(node.args[0]).shape, found.shape)))

    def _tl_minimum(self, node: ast.Call) -> Fact:
        return self._extreme(node, min)

    def _tl_maximum(self, node: ast.Call) -> Fact:
        return self._extreme(node, max)

    def _extreme(self, node: ast.Call, extreme: Callable[[float, float], float]) -> Fact:
        one, other = (self.known(argument) for argument in node.args[:2])
        low, high = extreme(one.low, other.low), extreme(one.high, other.high)
        return Fact(broadcast((one.shape, other.shape)), low, high, promoted(one.dtype, other.dtype))

    def _tl_cdiv(self, node: ast.Call) -> Fact:
        one, other = (self.known(argument) for argument in node.args)
        if one.number is None or other.number is None or min(one.low, other.low) < 1:
            return Fact((), dtype=promoted(one.dtype, other.dtype))
        number = -(-one.number // other.number)
        return Fact((), number, number, promoted(one.dtype, other.dtype))

    def _tl_cast(self, node: ast.Call) -> Fact:
        return self._cast(self.known(node.args[0]), node)

    def _tl_sum(self, node: ast.Call) -> Fact:
        inner = self.known(node.args[0])
        axes = [*node.args[1:], *(word.value for word in node.keywords if word.arg == "axis")]
        axis = self.known(axes[0]).number if axes else None
        dtype = inner.dtype if inner.dtype in _KEPT else ""
        if not axes:
            return Fact((), dtype=dtype)
        if inner.shape is None or axis is None or not 0 <= axis < len(inner.shape) or len(node.keywords) > 1:
            return Fact(dtype=dtype)
        return Fact(inner.shape[:axis] + inner.shape[axis + 1 :], dtype=dtype)

    _tl_max = _tl_min = _tl_sum

    def _tl_dot(self, node: ast.Call) -> Fact:
        left, right = (self.known(argument) for argument in node.args[:2])
        dtype = "float32" if left.dtype == right.dtype and left.dtype in ("float16", "bfloat16", "float32") else ""
        if left.shape is None or right.shape is None or len(left.shape) != 2 or len(right.shape) != 2:
            return Fact(dtype=dtype)
        return Fact((left.shape[0], right.shape[1]), dtype=dtype)

    def _tl_join(self, node: ast.Call) -> Fact:
        found = self._either([self.known(argument) for argument in node.args])
        return Fact(None if found.shape is None else (*found.shape, 2), dtype=found.dtype)
