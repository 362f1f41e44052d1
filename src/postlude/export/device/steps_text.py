"""The steps of a pass in an exported file: one expression at the place of its call, or a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from postlude.export.syntax.analysis import name_of
from postlude.export.syntax.source import parameter_names, written
from postlude.export.syntax.specialise import Inline, rename, specialise
from postlude.export.syntax.trees import walk

_INFIX = {"add": "{0} + {1}", "mul": "{0} * {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}"}
_INFIX |= {"div": "{0} / {1}", "rdiv": "{1} / {0}"}
_NAMES = {"before": "before_norm", "whole": "normalize", "moments": "finish"}


def steps_text(
    function: ast.FunctionDef, pointers: Mapping[str, str], slots: Mapping[int, str], channels: object
) -> tuple[ast.FunctionDef | None, Inline]:
    """The composed steps of a pass, as a function if they are more than one expression, and the text of its call."""
    order, name = parameter_names(function), function.name
    renamed = {f"t{slot}": word for slot, word in slots.items()} | dict(pointers)
    if _is_straight(function):
        renamed |= dict.fromkeys(filter(_is_value, [*order, *_names(function)]), "v")
    renamed[name] = _NAMES.get(name, f"{name}_steps")
    constants: dict[str, object] = {"C": channels} if name == "moments" else {}
    specialise(function, {**constants, **{word: Inline(form) for word, form in _INFIX.items()}}, renamed)
    places = {renamed.get(word, word): f"{{{number}}}" for number, word in enumerate(order)}
    first = function.body[0]
    if isinstance(first, ast.Return) and first.value is not None and not isinstance(first.value, ast.Tuple):
        rename(function, places)
        return None, Inline(written(first.value))
    return function, Inline(f"{function.name}({', '.join(places[word] for word in parameter_names(function))})")


def _is_straight(function: ast.FunctionDef) -> bool:
    """Whether each value is computed from the value before it alone, so that all of them can have one name."""
    previous = ""
    for place, (word, expression) in enumerate(_values(function)):
        read = set(filter(_is_value, _names(expression)))
        if len(read) > 1 or (place and read != {previous}):
            return False
        previous = word
    return True


def _values(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """The values that a function computes and returns, and how; the returned one has no name."""
    for node in function.body:
        if isinstance(node, ast.Return) and node.value is not None:
            yield "", node.value
        elif isinstance(node, ast.Assign) and _is_value(name := name_of(node.targets[0])):
            yield name, node.value


def _is_value(name: str) -> bool:
    return name[:1] == "v" and name[1:].isdigit()


def _names(node: ast.AST) -> Iterator[str]:
    """The names in a tree, except those of which only the dtype is read."""
    about = {part.value for part in walk(node) if isinstance(part, ast.Attribute) and part.attr == "dtype"}
    return (part.id for part in walk(node) if isinstance(part, ast.Name) and part not in about)
