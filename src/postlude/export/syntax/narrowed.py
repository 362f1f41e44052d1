"""Offsets in 32 bits where they fit. The library has them in 64, because its kernels take tensors of any size."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from postlude.export.syntax.analysis import name_of
from postlude.export.syntax.facts import WHOLE
from postlude.export.syntax.known import Known
from postlude.export.syntax.proven import MASKED
from postlude.export.syntax.trees import walk

_LONG = "tl.int64"
_KNOWN = (*MASKED, "tl.where", "tl.minimum", "tl.maximum", "tl.cast", ".to")  # calls that the facts follow


def narrow(function: ast.FunctionDef, known: Callable[[ast.FunctionDef], Known]) -> None:
    """Leaves out conversions to int64 where every value that becomes int32 by that is known to fit."""
    for parent in list(walk(function)):
        for name, value in list(ast.iter_fields(parent)):
            values = value if isinstance(value, list) else [value]
            for place, cast in enumerate(values):
                if isinstance(cast, ast.Call) and (inner := _converted(cast)) is not None:
                    long = _long(function, known(function)) - {cast}
                    vars(inner)["is_grouped"] = False
                    _put(parent, name, place, inner)
                    if not _all_fit(function, long, known(function), inner):
                        _put(parent, name, place, cast)


def _put(parent: ast.AST, name: str, place: int, node: ast.expr) -> None:
    held = getattr(parent, name)
    if isinstance(held, list):
        held[place] = node
    else:
        setattr(parent, name, node)


def _converted(node: ast.Call) -> ast.expr | None:
    """What a call converts to int64."""
    if node.keywords or not node.args or name_of(node.args[-1]) != _LONG:
        return None
    if name_of(node.func) == "tl.cast":
        return node.args[0]
    is_method = name_of(node.func) == ".to" and isinstance(node.func, ast.Attribute)
    return node.func.value if is_method else None  # type: ignore[attr-defined]


def _long(function: ast.FunctionDef, facts: Known) -> set[ast.expr]:
    """The expressions that are int64."""
    return {node for node in _expressions(function) if facts(node).dtype == "int64"}


def _all_fit(function: ast.FunctionDef, before: set[ast.expr], facts: Known, inner: ast.expr) -> bool:
    """Whether what was int64 still is, or fits in int32. No call that the facts do not follow may compute with it."""
    changed = {node for node in before if facts(node).dtype != "int64"}
    are_known = all(facts(node).dtype in ("int32", WHOLE) and facts(node).is_bounded for node in changed)
    calls = [node for node in _expressions(function) if isinstance(node, ast.Call) and name_of(node.func) not in _KNOWN]
    is_read = any(part in changed or part is inner for call in calls for part in call.args)
    return facts(inner).is_bounded and are_known and not is_read


def _expressions(function: ast.FunctionDef) -> Iterator[ast.expr]:
    for node in walk(ast.Module(function.body, [])):
        is_value = isinstance(node, ast.BinOp | ast.UnaryOp | ast.Call | ast.IfExp | ast.Subscript)
        is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if is_value or is_read:
            yield node  # type: ignore[misc]
