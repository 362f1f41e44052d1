"""The rules that specialise a function's tree: constants substituted, expressions folded, branches decided, dead code
removed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping

from postlude.export.syntax.analysis import (
    RANGES,
    UNKNOWN,
    Liveness,
    assignments,
    is_pure,
    name_of,
    never_runs,
    only_round,
    owners,
    reads,
    stored_names,
    times_read,
    value_of,
)
from postlude.export.syntax.source import Comment, is_empty
from postlude.export.syntax.trees import copied, walk

_INTEGERS = ("tl.int32", "tl.int64")
_EXTREMES: dict[str, Callable[[int, int], int]] = {"tl.minimum": min, "tl.maximum": max}


class Replaced(ast.NodeTransformer):
    """Replaces names by expressions, and calls of functions in `inlined` by theirs, with _0 as the first argument."""

    def __init__(self, words: Mapping[str, ast.expr], inlined: Mapping[str, ast.expr] | None = None) -> None:
        self.words, self.inlined = words, inlined or {}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_known = isinstance(node.ctx, ast.Load) and node.id in self.words
        return copied(self.words[node.id]) if is_known else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        found = self.visit(node.value)
        node.value = node.value if isinstance(found, ast.Constant) else found  # 0.to is not valid Python
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id not in self.inlined:
            return node
        places = {f"_{number}": argument for number, argument in enumerate(node.args)}
        return Replaced(places).visit(copied(self.inlined[node.func.id]))  # type: ignore[no-any-return]


def substitute(function: ast.FunctionDef, words: Mapping[str, ast.expr], inlined: Mapping[str, ast.expr]) -> None:
    """Substitutes constants. A parameter that the body overwrites is replaced up to that statement."""
    left = dict(words)
    for statement in function.body:
        assigned = stored_names(statement) & left.keys()
        if assigned and not isinstance(statement, ast.Assign):
            raise ValueError(f"{min(assigned)} is decided, and assigned by {ast.unparse(statement)!r}")
        Replaced(left, inlined).visit(statement)
        left = {name: value for name, value in left.items() if name not in assigned}


class Folded(ast.NodeTransformer):
    """Folds expressions. A name alone decides a condition, but stays where it is part of arithmetic."""

    def __init__(self, known: Mapping[str, object]) -> None:
        self.known = known

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        is_worked_out = isinstance(node, ast.BinOp | ast.Compare) or _is_not(node)
        if isinstance(node, ast.expr) and is_worked_out and (value := value_of(node, {})) is not UNKNOWN:
            return ast.Constant(value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Drops known parts of a condition; one decides it if nothing before it has side effects."""
        self.generic_visit(node)
        stops = isinstance(node.op, ast.Or)
        left: list[ast.expr] = []
        for part in node.values:
            value = value_of(part, self.known)
            if value is UNKNOWN or (bool(value) is stops and not all(map(is_pure, left))):
                left.append(part)
            elif bool(value) is stops:
                return ast.Constant(stops)
        node.values = left
        return node if len(left) > 1 else left[0] if left else ast.Constant(not stops)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        value = value_of(node.test, self.known)
        return node if value is UNKNOWN else node.body if value else node.orelse

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Writes tl.expand_dims as indexing; the kernels use it only for a second axis of a one-dimensional block. A 0
        is one of every type. The smaller and the larger of two numbers are known."""
        self.generic_visit(node)
        if (extreme := _EXTREMES.get(name_of(node.func))) and len(node.args) == 2:
            first, second = (value_of(part, {}) for part in node.args)
            if type(first) is int and type(second) is int:
                return ast.Constant(extreme(first, second))
        if isinstance(node.func, ast.Attribute) and node.args and name_of(node.args[0]) in _INTEGERS:
            owner = value_of(node.func.value, self.known)
            if node.func.attr == "to" and type(owner) is int and owner == 0:
                return ast.Constant(0)
        if name_of(node.func) in RANGES and len(node.args) == 2 and value_of(node.args[0], {}) == 0:
            del node.args[0]
        axis = value_of(node.args[1], {}) if name_of(node.func) == "tl.expand_dims" else None
        if axis not in (0, 1):
            return node
        index: list[ast.expr] = [ast.Slice(), ast.Constant(None)]
        return ast.Subscript(node.args[0], ast.Tuple(index if axis else index[::-1], ast.Load()), ast.Load())


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def rewritten(block: list[ast.stmt], change: Callable[[ast.stmt], list[ast.stmt]]) -> list[ast.stmt]:
    """The statements after `change`, inner ones first. Comments above a removed statement go with it, and statements
    after a return are removed."""
    made: list[ast.stmt] = []
    for node in block:
        if isinstance(node, ast.If | ast.For):
            node.body, node.orelse = rewritten(node.body, change), rewritten(node.orelse, change)
        after = change(node)
        while not after and made and isinstance(above := made[-1], Comment) and above.text.startswith("# "):
            made.pop()
        made += after
        if made and isinstance(made[-1], ast.Return):
            break
    return made


def taken(node: ast.If, truth: bool) -> list[ast.stmt]:
    return node.body if truth else node.orelse


def decide(function: ast.FunctionDef, known: Mapping[str, object]) -> None:
    """Replaces known conditions by the branch that is taken, and loops of one round by their body."""

    def change(node: ast.stmt) -> list[ast.stmt]:
        if isinstance(node, ast.For) and (first := only_round(node, known)) is not None:
            words = dict.fromkeys(stored_names(node.target), ast.Constant(first))
            return [Replaced(words).visit(statement) for statement in node.body]
        value = value_of(node.test, known) if isinstance(node, ast.If) else UNKNOWN
        return [node] if value is UNKNOWN or not isinstance(node, ast.If) else taken(node, bool(value))

    function.body = rewritten(function.body, change)


def leave_out(function: ast.FunctionDef, helpers: Collection[str] = ()) -> None:
    """Removes assignments that are never read, and blocks that do nothing. `helpers` are functions that store
    nothing."""
    dead = set(Liveness(function, helpers).dead)
    read = reads(function)

    def change(node: ast.stmt) -> list[ast.stmt]:
        if isinstance(node, ast.If) and is_empty(node.orelse):
            node.orelse = []
        return [] if node in dead or _does_nothing(node, read) else [node]

    function.body = rewritten(function.body, change)


def _does_nothing(node: ast.stmt, read: set[str]) -> bool:
    if isinstance(node, ast.For):
        is_unread = stored_names(node.target).isdisjoint(read)
        return never_runs(node) or (is_empty(node.body) and is_pure(node.iter) and is_unread)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Tuple):
        return [ast.unparse(target) for target in node.targets] == [ast.unparse(node.value)]
    return isinstance(node, ast.If) and is_empty([*node.body, *node.orelse]) and is_pure(node.test)


def propagated(function: ast.FunctionDef, known: Mapping[str, object]) -> dict[str, ast.expr]:
    """Substitutes locals that are just another name for a flag, a whole number, or another local; returns them."""
    singles, assigned = single_values(function), assignments(function)
    names = {arg.arg for arg in function.args.args} - set(assigned) | set(singles)
    words: dict[str, ast.expr] = {}
    for name, value in singles.items():
        constant = value_of(value, known)
        if isinstance(constant, bool | str | int):
            words[name] = ast.Constant(constant)
        elif isinstance(value, ast.Name) and value.id in names:
            words[name] = value
    words |= _loop_names(function, singles)
    words = {name: value for name, value in words.items() if not (isinstance(value, ast.Name) and value.id in words)}
    for statement in function.body:
        Replaced(words).visit(statement)
    return words


def _loop_names(function: ast.FunctionDef, singles: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
    """Locals of a loop, read only there, that are another name for what it counts."""
    found: dict[str, ast.expr] = {}
    every = times_read(function)
    for loop in (node for node in walk(function) if isinstance(node, ast.For)):
        counted, inside = stored_names(loop.target), times_read(loop)
        changed = set[str]().union(*map(stored_names, loop.body))
        for name in (changed & singles.keys()) - owners(loop):  # a loop may count in Python's numbers
            value = singles[name]
            if isinstance(value, ast.Name) and value.id in counted - changed and every[name] == inside[name]:
                found[name] = value
    return found


def single_values(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Locals that are assigned once."""
    parameters = {arg.arg for arg in function.args.args}
    places = {name: found for name, found in assignments(function).items() if name not in parameters}
    values = {name: found[0][1] for name, found in places.items() if len(found) == 1}
    return {name: value for name, value in values.items() if value is not None}
