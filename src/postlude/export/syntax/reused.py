"""Reads a name where its value would be computed again."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from postlude.export.syntax.analysis import assignments, calls_in, name_of, reads
from postlude.export.syntax.rules import single_values


def reuse_names(function: ast.FunctionDef) -> None:
    """Replaces whole-number arithmetic that an earlier statement has a name for."""
    singles, assigned = single_values(function), assignments(function)
    parameters = {arg.arg for arg in function.args.args} - assigned.keys()
    fixed = {
        name: value
        for name, value in singles.items()
        if isinstance(value, ast.BinOp) and reads(value) <= parameters | singles.keys() and _is_constant(value)
    }
    _reuse(function.body, fixed, {})


def _is_constant(value: ast.expr) -> bool:
    """Whether nothing that happens in between can change what an expression of these names gives, as for a load."""
    return all(name_of(call.func) in ("tl.program_id", "tl.arange") for call in calls_in(value))


def _reuse(block: list[ast.stmt], fixed: Mapping[str, ast.expr], before: Mapping[str, str]) -> None:
    """`before` has the names that are assigned by then, by their values."""
    names = dict(before)
    for node in block:
        for inner in (getattr(node, "body", []), getattr(node, "orelse", [])):
            _reuse(inner, fixed, names)
        named = _Named(names)
        if isinstance(node, ast.For):
            node.iter = named.visit(node.iter)
        elif isinstance(node, ast.If):
            node.test = named.visit(node.test)
        else:
            named.visit(node)
        name = node.targets[0].id if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else ""
        if name in fixed and isinstance(node.value, ast.BinOp):  # type: ignore[attr-defined]
            names.setdefault(ast.dump(node.value), name)  # type: ignore[attr-defined]


class _Named(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        name = self.names.get(ast.dump(node))
        return ast.Name(name, ast.Load()) if name is not None else self.generic_visit(node)
