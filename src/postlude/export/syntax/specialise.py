"""Specialises a kernel to one case: compile-time flags decided, dead branches and unread parameters removed.

Comments stay, and the result reads as if it had been written for the one case.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from postlude.export.syntax import rules
from postlude.export.syntax.analysis import UNKNOWN, Liveness, assignments, times_read, value_of
from postlude.export.syntax.comments import decided, with_one_of_two, with_words
from postlude.export.syntax.source import Comment, parameters, remark_of, written
from postlude.export.syntax.trees import parsed, walk
from postlude.plan.program import Word


@dataclass(frozen=True)
class Inline:
    """A function whose calls become this text, {0} their first argument: Inline("relu({0})")."""

    text: str


def specialise(
    function: ast.FunctionDef,
    constants: Mapping[str, object],
    names: Mapping[str, str] | None = None,
    keep: Collection[str] = (),
) -> None:
    """Decides `constants` in a function and renames identifiers by `names`, in place; a `Word` is put in as it stands.

    Constants in `keep` stay parameters, and still decide conditions. Those that the function does not have are ignored.
    """
    names = names or {}
    put_in = {name: value for name, value in constants.items() if name not in keep}
    _decide_comments(function, put_in, names)
    words = {name: _expression(value) for name, value in put_in.items() if not isinstance(value, Inline)}
    inlined = {name: _template(value) for name, value in put_in.items() if isinstance(value, Inline)}
    rules.substitute(function, words, inlined)
    simplify(function, constants)
    drop_unread(function)
    rename(function, names)


def simplify(
    function: ast.FunctionDef, constants: Mapping[str, object] | None = None, helpers: Collection[str] = ()
) -> None:
    """Applies the rules until none changes anything. `helpers` are functions that store nothing."""
    before = ""
    while before != (before := ast.dump(function)):
        known = _known(function, constants or {})
        rules.Folded(known).visit(function)
        rules.decide(function, known)
        rules.leave_out(function, helpers)
        _say(function, rules.propagated(function, known))
    _leave_unread_unnamed(function)


def _expression(value: Any) -> ast.expr:
    return parsed(value.text) if isinstance(value, Word) else ast.Constant(value)


def _template(value: Inline) -> ast.expr:
    return parsed(re.sub(r"\{(\d+)\}", r"_\1", value.text))


def _known(function: ast.FunctionDef, constants: Mapping[str, object]) -> dict[str, object]:
    """Constants that the body does not overwrite, and locals with one value."""
    assigned = assignments(function)
    known = {name: value for name, value in constants.items() if name not in assigned}
    known = {name: value for name, value in known.items() if not isinstance(value, Word | Inline)}
    for name, expression in rules.single_values(function).items():
        if (value := value_of(expression, known)) is not UNKNOWN:
            known[name] = value
    return known


def _decide_comments(function: ast.FunctionDef, constants: Mapping[str, object], names: Mapping[str, str]) -> None:
    """Resolves conditions in remarks. A comment on its own lines is left alone, because sentences span lines there."""
    words = {old: new for old, new in names.items() if re.search(r"[A-Z_\d]", old)}  # others may be plain English
    for name, value in constants.items():  # numbers read well in prose, flags do not
        if isinstance(value, Word | Inline):
            words[name] = value.text.partition("(")[0]
        elif type(value) in (int, float) and name.isupper():
            words[name] = str(value)
    for node in walk(function):
        if remark := remark_of(node):
            vars(node)["remark"] = with_words(decided(remark, constants), words)
        elif isinstance(node, Comment):
            if node.text.startswith('"'):  # a docstring: its quotes are no part of what is decided
                text = with_one_of_two(node.text[3:-3], constants)
                node.text = f'"""{text}{"." * (node.text.endswith(".", 0, -3) and not text.endswith("."))}"""'
            node.text = with_words(node.text, words)


def _say(function: ast.FunctionDef, values: Mapping[str, ast.expr]) -> None:
    """Replaces names in capitals by their values in remarks as well."""
    words = {name: written(value) for name, value in values.items() if name.isupper()}
    for node in walk(function):
        if remark := remark_of(node):
            plain = re.sub(r", (\w+) = [^,;]*", lambda m: "" if m[1] in words else m[0], remark)
            vars(node)["remark"] = with_words(plain, words)


def drop_unread(function: ast.FunctionDef) -> None:
    """Removes parameters that the body does not read."""
    needed = Liveness(function).at_start
    left = [(arg, default) for arg, default in parameters(function) if arg.arg in needed]
    function.args.args = [arg for arg, _ in left]
    function.args.defaults = [default for _, default in left if default is not None]


def _leave_unread_unnamed(function: ast.FunctionDef) -> None:
    """Names the parts of a tuple that nobody reads _."""
    read = times_read(function)
    tuples = [node.targets[0] for node in walk(function) if isinstance(node, ast.Assign)]
    for part in (part for target in tuples if isinstance(target, ast.Tuple) for part in target.elts):
        if isinstance(part, ast.Name) and not read[part.id]:
            part.id = "_"


def rename(function: ast.FunctionDef, names: Mapping[str, str]) -> None:
    function.name = names.get(function.name, function.name)
    for node in walk(function):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
        elif isinstance(node, ast.arg):
            node.arg = names.get(node.arg, node.arg)
