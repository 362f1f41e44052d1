"""Removes assignments that compute again what a name already holds, such as a load in what were two loops."""

from __future__ import annotations

import ast
import functools

from postlude.export.device.library import library
from postlude.export.syntax.analysis import calls_in, is_pure, name_of, reads, stored_names
from postlude.export.syntax.source import Comment

_POINTERS = ("p_", "d_")


def remove_repeats(function: ast.FunctionDef) -> None:
    _remove(function.body)


def _remove(block: list[ast.stmt]) -> None:
    for node in block:
        for inner in (getattr(node, "body", []), getattr(node, "orelse", [])):
            _remove(inner)
    block[:] = [node for place, node in enumerate(block) if not _is_repeated(block[:place], node)]


def _is_repeated(before: list[ast.stmt], node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name) or _written(node):
        return False
    needed = {node.targets[0].id, *reads(node.value)}
    for other in reversed(before):
        if _is_same(other, node):
            return node.targets[0].id not in reads(node.value)
        if not isinstance(other, Comment) and (stored_names(other) | _written(other)) & needed:
            return False
    return False


def _is_same(one: ast.stmt, other: ast.Assign) -> bool:
    """Whether two statements assign the same value to the same name."""
    if not isinstance(one, ast.Assign) or stored_names(one.targets[0]) != stored_names(other.targets[0]):
        return False
    return ast.dump(one) == ast.dump(other)


def _written(node: ast.stmt) -> set[str]:
    """The pointers that a statement may write to: those that stand in a call that may store."""
    calls = [call for call in calls_in(node) if not _only_reads(call)]
    return {name for call in calls for name in reads(call) if name.startswith(_POINTERS)}


def _only_reads(call: ast.Call) -> bool:
    return is_pure(ast.Call(call.func, [], []), pure_helpers())


@functools.cache
def pure_helpers() -> frozenset[str]:
    """The library's device functions that store nothing."""
    return frozenset(name for name in library() if not writes(name))


@functools.cache
def writes(name: str) -> bool:
    """Whether a function writes to memory: one of Triton's, a method, or a device function, itself or in what it
    calls."""
    owner, dot, last = name.rpartition(".")
    if dot:
        return last == "store" or (owner == "tl" and last.startswith("atomic_"))
    if name not in library():
        return False
    return any(map(writes, {name_of(call.func) for call in calls_in(library()[name])} - {name}))
