"""Writes kernels in fewer statements: a short expression that is read once is inlined."""

from __future__ import annotations

import ast
from collections.abc import Collection

from postlude.export.syntax.analysis import (
    Liveness,
    calls_in,
    is_pure,
    name_of,
    reads,
    stored_names,
    times_read,
)
from postlude.export.syntax.rules import Replaced
from postlude.export.syntax.source import remark_of, written

SHORT = 46  # characters of an expression that may be part of another
_LONG = 108  # of the statement that it becomes a part of
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)


def join(function: ast.FunctionDef, helpers: Collection[str] = ()) -> None:
    """Inlines expressions, of Triton's functions and these. A statement with a remark, such as a shape, keeps its line,
    and so does one that is read inside a loop or a branch, where it would be computed again. Loads stay in their order.
    """
    _join_block(function, function.body, 4, helpers)


def _join_block(function: ast.FunctionDef, block: list[ast.stmt], indent: int, helpers: Collection[str]) -> None:
    for node in block:
        for inner in filter(None, (getattr(node, "body", []), getattr(node, "orelse", []))):
            _join_block(function, inner, indent + 4, helpers)
    live = Liveness(function)
    for place in reversed(range(len(block))):
        if is_pure(block[place], helpers) and _is_joined(live, block, place, indent):
            del block[place]


def _joined_name(node: ast.stmt) -> str:
    is_plain = isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    return node.targets[0].id if is_plain else ""  # type: ignore[attr-defined]


def _is_joined(live: Liveness, block: list[ast.stmt], place: int, indent: int) -> bool:
    """Whether a statement was inlined where its value was read."""
    node, name = block[place], _joined_name(block[place])
    if not isinstance(node, ast.Assign) or not name or remark_of(node) or not _may_move(node.value):
        return False
    after = next((at for at in range(place + 1, len(block)) if name in reads(block[at])), None)
    if after is None or not isinstance(reader := block[after], _SIMPLE):
        return False
    if _loads(node.value) and (after > place + 1 or _loads(reader) or not isinstance(reader, ast.Assign)):
        return False
    between = set[str]().union(*(stored_names(other) for other in block[place + 1 : after]))
    is_overwritten = name in stored_names(reader) and not isinstance(reader, ast.AugAssign)
    is_read_later = name in live.after[reader] and not is_overwritten
    if times_read(reader)[name] != 1 or is_read_later or between & {name, *reads(node.value)}:
        return False
    length = len(written(reader)) - len(name) + len(written(node.value)) + len(remark_of(reader))
    if indent + length > _LONG:
        return False
    Replaced({name: node.value}).visit(reader)
    for other in block[place + 1 : after]:
        live.after[other] = live.after[other] | reads(node.value)
    return True


def _may_move(value: ast.expr) -> bool:
    calls = [name_of(call.func) for call in calls_in(value)]
    is_number = isinstance(value, ast.Constant)  # 0.to is not valid Python
    stays = any(call.endswith("dot") for call in calls)  # three products in one line would be hard to read
    return not is_number and not stays and len(written(value)) <= SHORT


def _loads(node: ast.AST) -> bool:
    """Whether something is loaded; a kernel's loads and stores keep their order."""
    return any(name_of(call.func).endswith("load") for call in calls_in(node))
