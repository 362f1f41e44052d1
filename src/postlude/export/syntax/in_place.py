"""The library's kernels with their shared functions inlined.

A reader of an exported file wants to read one kernel from top to bottom. Names that a shared function returns become
the caller's names. Its other names stay, so they must not collide with the caller's.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from postlude.export.syntax.analysis import Liveness, name_of, reads, stored_names
from postlude.export.syntax.rules import rewritten
from postlude.export.syntax.source import Comment
from postlude.export.syntax.trees import copied, walk

# The functions of kernels/triton that are inlined; all others stay functions.
SHARED = frozenset(
    [
        *("epilogue", "store_full"),
        *("own_channels", "own_rows", "own_sample", "own_tile", "has_first", "beside", "of_groups"),
        *("combined_parts", "part_at", "count_at"),
        *("scale_of", "high_plane", "store_planes", "multiply"),
        *("packed_row", "store_border", "weight_scale", "store_weights", "phase_step"),
    ]
)


def without_shared(trees: Mapping[str, ast.FunctionDef]) -> dict[str, ast.FunctionDef]:
    """All functions but the shared ones, by name, with calls of shared ones inlined."""
    whole = dict[str, ast.FunctionDef]()
    for name in trees:
        _make_whole(name, trees, whole)
    return {name: tree for name, tree in whole.items() if name not in SHARED}


def _make_whole(name: str, trees: Mapping[str, ast.FunctionDef], whole: dict[str, ast.FunctionDef]) -> None:
    """Adds a function to the inlined ones, after those that it calls."""
    if name in whole:
        return
    function = trees[name]
    for called in sorted({_called(node) for node in walk(function)} - {""}):
        _make_whole(called, trees, whole)
    _Expressions(whole).visit(function)
    after = Liveness(function).after
    function.body = rewritten(function.body, lambda node: _statements(node, whole, after.get(node, set())))
    if left := [node for node in walk(function) if _called(node)]:
        raise ValueError(f"{_called(left[0])} is not called as a statement")
    whole[name] = function


def _called(node: ast.AST) -> str:
    """The name of the called function, if it is a shared one."""
    name = name_of(node.func) if isinstance(node, ast.Call) else ""
    return name if name in SHARED else ""


def _body(shared: ast.FunctionDef) -> list[ast.stmt]:
    first = shared.body[0]
    return shared.body[isinstance(first, Comment) and first.text.startswith('"""') :]


def _given(call: ast.Call, shared: ast.FunctionDef) -> dict[str, ast.expr]:
    return dict(zip((arg.arg for arg in shared.args.args), call.args, strict=True))


class InPlace(ast.NodeTransformer):
    """Replaces names by other names, or by expressions if they are only read."""

    def __init__(self, words: Mapping[str, ast.expr]) -> None:
        self.words = words

    def visit_Name(self, node: ast.Name) -> ast.expr:
        word = copied(self.words.get(node.id, node))
        if isinstance(word, ast.Name):
            word.ctx = node.ctx
        elif isinstance(node.ctx, ast.Store):
            raise ValueError(f"{node.id} is assigned, and {ast.unparse(word)} is no name")
        return word


class _Expressions(ast.NodeTransformer):
    """Replaces calls of functions that consist of one expression."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.functions = functions

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        shared = self.functions.get(_called(node))
        if shared is None or not isinstance(only := _body(shared)[0], ast.Return):
            return node
        return InPlace(_given(node, shared)).visit(copied(only.value))  # type: ignore


def _statements(node: ast.stmt, functions: Mapping[str, ast.FunctionDef], after: set[str]) -> list[ast.stmt]:
    """The statements that replace a statement, after which the names `after` are read."""
    call = node.value if isinstance(node, ast.Assign | ast.Expr) else None
    if not isinstance(call, ast.Call) or not (name := _called(call)):
        return [node]
    body, given = _body(functions[name]), _given(call, functions[name])
    last, targets = body[-1], _parts(node.targets[0] if isinstance(node, ast.Assign) else None)
    results = _parts(last.value if isinstance(last, ast.Return) else None)
    if len(results) != len(targets):
        raise ValueError(f"{name} gives {len(results)} values for {len(targets)} names")
    pairs = [(target, result) for target, result in zip(targets, results) if ast.unparse(target) != "_"]
    words = {r.id: target for target, r in pairs if isinstance(r, ast.Name) and r.id not in given} | given
    change = InPlace(words)
    made = [change.visit(copied(part)) for part in body if part is not last or not results]
    for target, result in pairs:
        value = change.visit(copied(result))
        made += [ast.Assign([target], value, lineno=0)] if ast.unparse(value) != ast.unparse(target) else []
    _check(functions[name], words, given, after - stored_names(node))
    return made


def _parts(node: ast.expr | None) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [] if node is None else [node]


def _check(
    shared: ast.FunctionDef, words: Mapping[str, ast.expr], given: Mapping[str, ast.expr], after: set[str]
) -> None:
    """Raises if the shared text assigns a name that the caller or an argument reads afterwards."""
    for statement, later in Liveness(shared).after.items():
        stored = stored_names(statement)
        read = after.union(*(reads(given[name]) for name in (later & given.keys()) - stored))
        if clash := {ast.unparse(words.get(name, ast.Name(name))) for name in stored} & read:
            raise ValueError(f"{shared.name} assigns {min(clash)}, which its caller reads afterwards")
