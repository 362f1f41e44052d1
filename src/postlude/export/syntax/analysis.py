"""Analysis of a function's expressions: known values, side effects, and assignments that are never read."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from postlude.export.syntax.source import Comment
from postlude.export.syntax.trees import walk

UNKNOWN = object()
_ROUNDING = (ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift)
_WHOLE = (ast.Add, ast.Sub, ast.Mult, ast.BitAnd, ast.BitOr, *_ROUNDING)  # whole numbers of whole numbers
_PLAIN = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Tuple, ast.List)
RANGES = ("range", "tl.range", "tl.static_range")
_EFFECTS = ("store", "atomic", "device_", "static_", "debug_", "inline_asm", "assume")
_PURE_METHODS = ("to", "load", "sum", "max", "min", "reshape", "view", "trans", "permute", "broadcast_to", "cast")
_PURE_BUILTINS = ("range", "len", "min", "max", "abs", "int", "float", "bool")
_TRITON = SimpleNamespace(cdiv=lambda x, y: -(-x // y))
Assignments = dict[str, list[tuple[ast.stmt, ast.expr | None]]]


def value_of(node: ast.expr, known: Mapping[str, object]) -> Any:
    """The value of an expression; UNKNOWN if it depends on other names. Only integer arithmetic is evaluated."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    if isinstance(node, ast.Call) and name_of(node.func) == "tl.cdiv":
        parts = [value_of(part, known) for part in node.args]
        return _TRITON.cdiv(*parts) if all(type(part) is int and part > 0 for part in parts) else UNKNOWN
    parts = [value_of(part, known) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    if not isinstance(node, _PLAIN) or UNKNOWN in parts:
        return UNKNOWN
    if isinstance(node, ast.BinOp):
        if not isinstance(node.op, _WHOLE) or any(type(part) is not int for part in parts):
            return UNKNOWN
        if isinstance(node.op, _ROUNDING) and (min(parts) < 0 or parts[1] == 0):
            return UNKNOWN  # the device rounds towards 0, Python rounds down
    return eval(ast.unparse(node), {"__builtins__": {}, "tl": _TRITON}, dict(known))


def name_of(node: ast.expr) -> str:
    """The dotted name of an expression, such as `tl.zeros`; for a method of anything else `.to`."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Attribute):
        return ""
    owner = name_of(node.value)
    return f"{owner if owner.split('.')[0] in ('tl', 'triton') else ''}.{node.attr}"


def calls_in(node: ast.AST, name: str = "") -> list[ast.Call]:
    """The calls in a tree: of the function with this dotted name, or all."""
    calls = [part for part in walk(node) if isinstance(part, ast.Call)]
    return [call for call in calls if name in ("", name_of(call.func))]


def leftmost(node: ast.expr) -> ast.expr:
    """A pointer, without what is added to it."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return node


def is_pure(node: ast.AST, helpers: Collection[str] = ()) -> bool:
    """Whether evaluation has no side effects: no store, and no call of a function other than Triton's own and these."""
    for part in walk(node):
        if isinstance(part, ast.Call):
            owner, _, last = name_of(part.func).rpartition(".")
            if last in helpers and isinstance(part.func, ast.Name):
                continue
            if owner:
                allowed = not last.startswith(_EFFECTS)
            else:
                allowed = last in (_PURE_METHODS if isinstance(part.func, ast.Attribute) else _PURE_BUILTINS)
            if not allowed:
                return False
    return True


def never_runs(node: ast.For) -> bool:
    """A loop over a range that is known to be empty."""
    found = _range_of(node, {})
    return found is not None and not found


def only_round(node: ast.For, known: Mapping[str, object]) -> int | None:
    """The first number of a loop over a range that is known to have one; None if the loop assigns it."""
    found = _range_of(node, known)
    is_left = stored_names(node.target).isdisjoint(set[str]().union(*map(stored_names, node.body)))
    return found[0] if found is not None and len(found) == 1 and is_left else None


def _range_of(node: ast.For, known: Mapping[str, object]) -> range | None:
    if not isinstance(node.iter, ast.Call) or name_of(node.iter.func) not in RANGES or node.iter.keywords:
        return None
    limits = [value_of(argument, known) for argument in node.iter.args]
    return range(*limits) if all(type(limit) is int for limit in limits) and 0 not in limits[2:] else None


def assignments(function: ast.FunctionDef) -> Assignments:
    """The names that the body assigns: each statement, and its value if it assigns just this name."""
    found: Assignments = {}
    for statement in walk(ast.Module(function.body, [])):
        if isinstance(statement, ast.stmt):
            for part in ast.iter_child_nodes(statement):
                for name in set() if isinstance(part, ast.stmt) else stored_names(part):
                    found.setdefault(name, []).append((statement, _one_value(statement)))
    return found


def _one_value(node: ast.stmt) -> ast.expr | None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.value
    return node.value if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else None


class Liveness:
    """Assignments that are overwritten before they are read, the names that are read after each statement, and those
    that are live at the start. `helpers` are functions that store nothing."""

    def __init__(self, function: ast.FunctionDef, helpers: Collection[str] = ()) -> None:
        self.helpers = helpers
        self.dead: list[ast.stmt] = []
        self.after: dict[ast.stmt, set[str]] = {}
        self.at_start = self._block(function.body, set())

    def _block(self, block: list[ast.stmt], after: set[str]) -> set[str]:
        for statement in reversed(block):
            self.after[statement] = after
            after = self._statement(statement, after)
        return after

    def _statement(self, node: ast.stmt, after: set[str]) -> set[str]:
        if isinstance(node, ast.If):
            return reads(node.test) | self._block(node.body, after) | self._block(node.orelse, after)
        if isinstance(node, ast.For):
            return self._loop(node, after)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            return self._assignment(node, after)
        if isinstance(node, ast.Return):
            return reads(node)
        if isinstance(node, ast.Expr | ast.Pass | Comment):
            return after | reads(node)
        raise ValueError(f"kernels have no statement such as {ast.unparse(node)!r}")

    def _loop(self, node: ast.For, after: set[str]) -> set[str]:
        targets, round_again, mark = stored_names(node.target), after, len(self.dead)
        while True:
            del self.dead[mark:]
            grown = round_again | (self._block(node.body, round_again) - targets)
            if grown == round_again:
                return grown | reads(node.iter)
            round_again = grown

    def _assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, after: set[str]) -> set[str]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {name for target in targets for name in stored_names(target)}
        plain = all(isinstance(t, ast.Name | ast.Tuple) for t in targets)
        assert node.value is not None
        if plain and not names & after and is_pure(node.value, self.helpers):
            self.dead.append(node)
            return after
        return (after | names if isinstance(node, ast.AugAssign) else after - names) | reads(node)


def owners(node: ast.AST) -> set[str]:
    """The names that an attribute is read of, such as x in x.to: no number can replace them."""
    found = (part.value for part in walk(node) if isinstance(part, ast.Attribute))
    return {owner.id for owner in found if isinstance(owner, ast.Name)}


def reads(node: ast.AST) -> set[str]:
    return {part.id for part in walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}


def times_read(*nodes: ast.AST) -> Counter[str]:
    """How often each name is read in these nodes."""
    names = (part for node in nodes for part in walk(node) if isinstance(part, ast.Name))
    return Counter(part.id for part in names if isinstance(part.ctx, ast.Load))


def stored_names(node: ast.AST) -> set[str]:
    return {part.id for part in walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
