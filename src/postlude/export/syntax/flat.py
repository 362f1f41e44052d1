"""Blocks of one column as blocks of one axis: the library's kernels have a second one for tiles of several channels."""

from __future__ import annotations

import ast
from collections.abc import Callable

from postlude.export.syntax.analysis import calls_in, name_of, value_of
from postlude.export.syntax.facts import Shape
from postlude.export.syntax.known import Known
from postlude.export.syntax.trees import copied, walk

_VALUES = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Subscript, ast.Name)
_EXTREMES = ("tl.max", "tl.min")
_ORDERED = ("sum", "dot", "trans", "permute", "reshape", "view", "join", "cumsum", "reduce", "sort", "argmax", "argmin")


def flatten(
    function: ast.FunctionDef, known: Callable[[ast.FunctionDef], Known], helpers: Callable[[str], ast.AST | None]
) -> bool:
    """Takes the second axis off all blocks, if it is 1 in each of them; says whether. Extremes are the same in any
    order, sums are not. `helpers` gives the device functions, which must not ask for axes."""
    if not any(_is_one(call) for call in calls_in(function, "tl.arange")) or not _may_change(function, helpers):
        return False
    facts, flat = known(function), copied(function)
    shapes = [facts(node).shape for node in walk(function) if isinstance(node, _VALUES) and _is_value(node, function)]
    if any(shape is None or len(shape) > 2 or shape[1:] not in ((), (1,)) for shape in shapes):
        return False
    _Flat().visit(flat)
    after = known(flat)
    if any(after.names[name].shape != _without_ones(fact.shape) for name, fact in facts.names.items()):
        return False
    function.body = flat.body
    return True


def _is_value(node: ast.expr, function: ast.FunctionDef) -> bool:
    """Whether an expression has a value that is computed with: not a name of a function or a call that only stores."""
    if isinstance(node, ast.Name):
        return False  # its assignments are looked at
    statements = [part.value for part in walk(function) if isinstance(part, ast.Expr)]
    counted = [part.iter for part in walk(function) if isinstance(part, ast.For)]
    return node not in statements and node not in counted


def _may_change(function: ast.AST, helpers: Callable[[str], ast.AST | None]) -> bool:
    for call in calls_in(function):
        name = name_of(call.func)
        axes = [*call.args[1:], *(word.value for word in call.keywords)] if name in _EXTREMES else []
        if name.rpartition(".")[2] in _ORDERED or any(value_of(axis, {}) != 0 for axis in axes):
            return False
        if isinstance(call.func, ast.Name) and name not in ("range", "float"):
            inner = helpers(name)
            if inner is None or not _may_change(inner, helpers) or _has_axes(inner):
                return False
    return True


def _has_axes(function: ast.AST) -> bool:
    words = (part.arg for part in walk(function) if isinstance(part, ast.keyword))
    return "axis" in words or any(isinstance(part, ast.Subscript) for part in walk(function))


def _is_one(call: ast.Call) -> bool:
    return [part.value for part in call.args if isinstance(part, ast.Constant)] == [0, 1]


def _without_ones(shape: Shape | None) -> Shape | None:
    return None if shape is None else tuple(size for size in shape if size != 1)


class _Flat(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return self.visit(node.value)  # type: ignore[no-any-return]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if name_of(node.func) == "tl.arange" and _is_one(node):
            return ast.Constant(0)
        if name_of(node.func) in ("tl.zeros", "tl.full") and isinstance(sizes := node.args[0], ast.List):
            sizes.elts = sizes.elts[:1]
        return self.generic_visit(node)
