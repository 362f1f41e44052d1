"""Expressions from text, and walks and copies of syntax trees.

An export takes a million steps of walks and copies, for which Python's take three times as long.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, TypeVar

_Tree = TypeVar("_Tree", bound=ast.AST | list[ast.stmt])
_SHARED = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)  # they hold nothing
_LEAVES = (ast.Name, ast.Constant)


def parsed(text: str) -> ast.expr:
    """The tree of an expression."""
    return ast.parse(text, mode="eval").body


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree in the order of ast.walk, without the contexts of names (Load and Store)."""
    todo = [node]
    for one in todo:  # which grows
        if type(one) not in _LEAVES:
            held = vars(one)
            for name in one._fields:
                part = held.get(name)
                if type(part) is list:
                    todo += [item for item in part if isinstance(item, ast.AST)]
                elif name != "ctx" and isinstance(part, ast.AST):
                    todo.append(part)
        yield one


def copied(tree: _Tree) -> _Tree:
    """A copy of a tree or of a block, with the attributes of its nodes."""
    made: _Tree = _copied(tree)
    return made


def _copied(part: Any) -> Any:
    if type(part) is list:
        return [_copied(item) for item in part]
    if not isinstance(part, ast.AST) or isinstance(part, _SHARED):
        return part
    made = type(part).__new__(type(part))
    held = vars(made)
    for name, value in vars(part).items():
        held[name] = _copied(value) if type(value) is list or isinstance(value, ast.AST) else value
    return made
