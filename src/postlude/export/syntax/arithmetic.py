"""Whole-number arithmetic with constants in a shorter form. Each rule holds for a division that rounds towards 0."""

from __future__ import annotations

import ast
from collections.abc import Callable

from postlude.export.syntax.analysis import UNKNOWN, value_of

_PLAIN = (ast.BinOp, ast.UnaryOp, ast.Name, ast.Constant)


def simpler(node: ast.BinOp, is_scalar: bool, whole: Callable[[ast.expr], ast.expr]) -> ast.expr:
    """A whole-number operation, or one that is equal and shorter. `whole` gives the expression that a name stands for,
    or the name."""
    right, inner = node.right, node.left
    if isinstance(node.op, ast.Add):
        return _sum(inner, whole(right)) or node
    number = _number(right)
    if number is None or not isinstance(inner, ast.BinOp) or (other := _number(inner.right)) is None:
        return node
    is_division, is_inner_rest = isinstance(node.op, ast.FloorDiv), isinstance(inner.op, ast.Mod)
    if is_division and isinstance(inner.op, ast.FloorDiv):
        return ast.BinOp(inner.left, ast.FloorDiv(), ast.Constant(other * number))
    if is_division and is_inner_rest and other <= number and is_scalar:
        return ast.Constant(0)
    if isinstance(node.op, ast.Mod) and is_inner_rest and other % number == 0:
        return ast.BinOp(inner.left, ast.Mod(), right)
    return node


def simpler_comparison(node: ast.Compare) -> ast.expr:
    """`x // m < n` as `x < m * n`."""
    number, parts = _number(node.comparators[-1]), _operands(node.left, ast.FloorDiv)
    if len(node.ops) > 1 or not isinstance(node.ops[0], ast.Lt) or number is None or parts is None:
        return node
    return ast.Compare(parts[0], node.ops, [ast.Constant(parts[1] * number)])


def _sum(left: ast.expr, right: ast.expr) -> ast.expr | None:
    """x // m for x // (m·n)·n + x // m % n; x for x + y % 1, where y is a part of x, so that the sum has x's shape."""
    rest = _operands(right, ast.Mod)
    if rest is None:
        return None
    quotient, count = rest
    if count == 1:
        return left if ast.dump(quotient) in _terms(left) else None
    whole = _operands(left, ast.Mult)
    first = None if whole is None or whole[1] != count else _operands(whole[0], ast.FloorDiv)
    by = _operands(quotient, ast.FloorDiv) or (quotient, 1)
    is_same = first is not None and ast.dump(first[0]) == ast.dump(by[0]) and first[1] == by[1] * count
    return quotient if is_same else None


def _terms(node: ast.expr) -> set[str]:
    """The parts of an arithmetic expression, which its value is broadcast from."""
    if not isinstance(node, _PLAIN):
        return {ast.dump(node)}
    inner = (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
    return {ast.dump(node)}.union(*map(_terms, inner))


def _operands(node: ast.expr, kind: type[ast.operator]) -> tuple[ast.expr, int] | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, kind) or (number := _number(node.right)) is None:
        return None
    return node.left, number


def _number(node: ast.expr) -> int | None:
    value = value_of(node, {})
    return value if value is not UNKNOWN and type(value) is int and value > 0 else None
