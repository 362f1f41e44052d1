"""Arithmetic without what the facts prove to change nothing: terms of 0, factors of 1, remainders of what is smaller,
extremes that are known, conversions to the dtype that a value has."""

from __future__ import annotations

import ast

from postlude.export.syntax.analysis import name_of
from postlude.export.syntax.arithmetic import simpler, simpler_comparison
from postlude.export.syntax.facts import REAL, WHOLE, Fact
from postlude.export.syntax.known import Known
from postlude.export.syntax.rules import single_values

_WHOLE = (WHOLE, "int32", "int64")
MAGNITUDES = ("finite_magnitude",)  # device functions whose values are 0 or more
_EXACT = 1 << 24  # up to which fp32 holds every whole number


class ProvenNumbers(ast.NodeTransformer):
    """Asks for the facts of a node before its parts change."""

    def __init__(self, function: ast.FunctionDef, facts: Known) -> None:
        self.facts = facts
        self.singles = single_values(function)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The number that a local name always has. Parameters that are numbers keep their names, for the reader."""
        fact = self.facts(node) if isinstance(node.ctx, ast.Load) and node.id not in self.facts.given else Fact()
        is_one = fact.number is not None and fact.shape == () and fact.dtype in ("int32", WHOLE)
        return ast.Constant(fact.number) if is_one else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return node if isinstance(node.value, ast.Name) else self.generic_visit(node)  # 0.to is not valid Python

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name, fact, found = name_of(node.func), self.facts(node), None
        if name in ("tl.minimum", "tl.maximum") and len(node.args) == 2:
            found = self._extreme(node, fact, is_least=name == "tl.minimum")
        elif name == "tl.sum" and (number := self._count(node)) is not None:
            found = ast.Constant(number)
        elif name == ".to":
            found = self._converted(node, fact)
        elif name == "tl.reshape" and self._stands_for(node.args[0], fact):
            found = node.args[0]
        is_same = found is None or found is node
        return self.generic_visit(node) if is_same else self.visit(found)  # type: ignore

    def _stands_for(self, node: ast.expr, fact: Fact, other: Fact | None = None) -> bool:
        """Whether an expression has the shape and the dtype of the one that it is a part of, beside an `other` part."""
        own = self.facts(node)
        is_alike = own.dtype == fact.dtype or (own.dtype == WHOLE and fact.dtype == "int32" and own.shape == ())
        is_broadcast = own.shape is None or own.shape != fact.shape
        return own.dtype != "" and is_alike and (not is_broadcast or (other is not None and other.shape == ()))

    def _extreme(self, node: ast.Call, fact: Fact, is_least: bool) -> ast.expr:
        one, other = node.args
        if not is_least and _is_zeros(one) and self._is_magnitude(other) and self._stands_for(other, fact):
            return other
        least, most = (one, other) if self.facts(one).high <= self.facts(other).low else (other, one)
        below, above = self.facts(least), self.facts(most)
        chosen = least if is_least else most
        is_known = below.is_bounded and above.is_bounded and below.high <= above.low
        return chosen if is_known and self._stands_for(chosen, fact) else node

    def _is_magnitude(self, node: ast.expr) -> bool:
        """Whether a value is 0 or more and never NaN: a device function of the library says so of its own."""
        node = self.singles.get(node.id, node) if isinstance(node, ast.Name) else node
        return isinstance(node, ast.Call) and name_of(node.func) in MAGNITUDES

    def _count(self, node: ast.Call) -> float | None:
        """How many lanes a mask that always holds has."""
        mask = _counted_mask(node)
        fact = Fact() if mask is None else self.facts(mask)
        is_known = fact.is_true and fact.shape is not None and len(fact.shape) == 1 and fact.shape[0] <= _EXACT
        return float(fact.shape[0]) if is_known else None  # type: ignore[index]

    def _converted(self, node: ast.Call, fact: Fact) -> ast.expr | None:
        """The value without a conversion to its own dtype; a number that is converted."""
        value = node.func.value  # type: ignore[attr-defined]
        own = self.facts(value)
        if node.keywords:
            return None
        if own.number is not None and own.shape == () and fact.dtype == "float32" and abs(own.low) <= _EXACT:
            return ast.Constant(float(own.number))
        return value if own.dtype == fact.dtype and own.dtype not in ("", WHOLE, REAL) else None

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        fact = self.facts(node)
        found = self._operation(node, fact)
        if found is node and fact.dtype in _WHOLE:
            found = simpler(node, fact.shape == (), self._whole)
        found = self._with_one_number(found)
        if found is node:
            return self.generic_visit(node)
        if isinstance(found, ast.BinOp):
            vars(found)["is_grouped"] = vars(node).get("is_grouped", False)
        return self.visit(found)  # type: ignore[no-any-return]

    def _whole(self, node: ast.expr) -> ast.expr:
        return self.singles.get(node.id, node) if isinstance(node, ast.Name) else node

    def _operation(self, node: ast.BinOp, fact: Fact) -> ast.expr:
        op, left, right = type(node.op), self.facts(node.left), self.facts(node.right)
        is_exact = not fact.dtype.startswith(("float", "bfloat"))  # -0.0 + 0 is 0.0
        is_smaller = op in (ast.FloorDiv, ast.Mod) and left.low >= 0 and left.high < right.low
        is_zero = (is_smaller and op is ast.FloorDiv) or (op is ast.Mod and right.number == 1)
        is_zero |= op is ast.Mult and 0 in (left.number, right.number)
        if is_zero and fact.shape == () and fact.dtype in _WHOLE:
            return ast.Constant(0)
        drops_right = (is_smaller and op is ast.Mod) or (op in (ast.Mult, ast.FloorDiv) and right.number == 1)
        drops_right |= (op is ast.Sub or (op is ast.Add and is_exact)) and right.number == 0
        drops_right |= op is ast.BitAnd and right.is_true
        drops_left = (op is ast.Add and is_exact and left.number == 0) or (op is ast.Mult and left.number == 1)
        drops_left |= op is ast.BitAnd and left.is_true
        if drops_right and self._stands_for(node.left, fact, right):
            return node.left
        return node.right if drops_left and self._stands_for(node.right, fact, left) else node

    def _with_one_number(self, node: ast.expr) -> ast.expr:
        """A sum of whole numbers with two literals, such as 3 - x + 1, with one."""
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
            return node
        inner, number = node.left, _literal(node.right)
        if number is None or not isinstance(inner, ast.BinOp) or not isinstance(inner.op, ast.Add | ast.Sub):
            return node
        if not self.facts(node).is_bounded or not self.facts(inner).is_bounded:
            return node
        number = number if isinstance(node.op, ast.Add) else -number
        if (first := _literal(inner.left)) is not None and first + number > 0:
            return ast.BinOp(ast.Constant(first + number), inner.op, inner.right)
        if (last := _literal(inner.right)) is None:
            return node
        number += last if isinstance(inner.op, ast.Add) else -last
        return ast.BinOp(inner.left, ast.Add() if number >= 0 else ast.Sub(), ast.Constant(abs(number)))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        fact = self.facts(node)
        if fact.shape == () and fact.number is not None:
            return ast.Constant(bool(fact.number))
        return self.generic_visit(simpler_comparison(node))


def _is_zeros(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and name_of(node.func) == "tl.zeros"


def _literal(node: ast.expr) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _counted_mask(node: ast.expr) -> ast.expr | None:
    """The mask whose lanes a sum in fp32 counts."""
    if not isinstance(node, ast.Call) or name_of(node.func) != "tl.sum" or len(node.args) != 1 or node.keywords:
        return None
    to = node.args[0]
    if not isinstance(to, ast.Call) or name_of(to.func) != ".to" or [name_of(arg) for arg in to.args] != ["tl.float32"]:
        return None
    return to.func.value  # type: ignore[attr-defined, no-any-return]
