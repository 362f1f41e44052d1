"""A kernel cut down to one case: compile-time flags decided, dead branches out, unread parameters gone.

The text is edited by lines and spans until no rule finds anything more to do, so that comments and the way that lines
are broken stay, and what is left reads as if it had been written for the one case.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass

from postlude.export import comments, rules
from postlude.export.analysis import Liveness
from postlude.export.case import Case, Inline, Name
from postlude.export.source import Edit, Source, apply

__all__ = ["Inline", "Name", "Specialised", "specialise"]
_RULES = (rules.substitute, rules.fold, rules.decide, rules.leave_out, rules.propagate)


@dataclass(frozen=True)
class Specialised:
    text: str
    parameters: tuple[str, ...]  # those that are left, in order


def specialise(
    source: str,
    constants: Mapping[str, object],
    names: Mapping[str, str] | None = None,
    keep: frozenset[str] = frozenset(),
) -> Specialised:
    """One function's text with `constants` decided and identifiers renamed by `names`.

    Constants in `keep` stay parameters, and still decide conditions.
    """
    text = textwrap.dedent(source).strip("\n") + "\n"
    absent = set(constants) - {*re.findall(r"\w+", text)}
    if absent:
        raise ValueError(f"the text has no {', '.join(sorted(absent))}")
    case = Case({k: v for k, v in constants.items() if k not in keep}, constants)
    text = _decide_comments(text, case, names or {})
    while (after := _round(Source(text), case)) != text:
        text = after
    while unread := _unread_parameters(Source(text)):
        text = apply(text, unread)
    text = _rename(_tidy(text), names or {})
    arguments = Source(text).function.args
    left = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return Specialised(text, tuple(arg.arg for arg in left))


def _round(source: Source, case: Case) -> str:
    for rule in _RULES:
        edits = list(rule(source, case))
        if edits:
            return apply(source.text, edits)
    return source.text


def _decide_comments(text: str, case: Case, names: Mapping[str, str]) -> str:
    source = Source(text)
    renamed = {old: new for old, new in names.items() if re.search(r"[A-Z_\d]", old)}  # others may be plain English
    words = {**_words(case.decided), **renamed}
    edits = []
    for row, token in source.comments.items():
        start = source.starts[row - 1] + token.start[1]
        body = token.string.removeprefix("#").removeprefix(" ")
        if token.line[: token.start[1]].strip():  # a sentence on lines of its own may go on in the next
            body = comments.decided(body, case.decided)
        if body:
            edits.append(Edit(start, start + len(token.string), f"# {comments.with_words(body, words)}"))
        else:
            before = source.text[:start]
            edits.append(Edit(len(before.rstrip(" ")), start + len(token.string)))
    first = source.function.body[0]
    if ast.get_docstring(source.function) is not None and isinstance(first, ast.Expr):
        edits.append(Edit(*source.span(first), comments.with_words(source.segment(first), words)))
    return apply(text, edits)


def _words(constants: Mapping[str, object]) -> dict[str, str]:
    """What reads as well in prose as its name; flags do not."""
    found = {}
    for name, value in constants.items():
        if isinstance(value, Name):
            found[name] = value.text
        elif isinstance(value, Inline):
            found[name] = value.text.partition("(")[0]
        elif type(value) in (int, float) and name.isupper():
            found[name] = str(value)
    return found


def _unread_parameters(source: Source) -> list[Edit]:
    """All that have lines of their own; else the first."""
    arguments, needed = source.function.args, Liveness(source.function).at_start
    edits = []
    for number, arg in enumerate(arguments.args):
        if arg.arg in needed:
            continue
        start, end = source.span(arg)
        default = number - len(arguments.args) + len(arguments.defaults)
        if default >= 0:
            end = source.span(arguments.defaults[default])[1]
        line, (before, after) = arg.lineno, (arguments.args[:number][-1:], arguments.args[number + 1 :][:1])
        last = source.text.count("\n", 0, end) + 1
        has_own_line = not source.lines[line - 1][: arg.col_offset].strip() and not (after and after[0].lineno == last)
        if has_own_line and last < source.line_end(line):
            edits.append(source.cut(line, last, with_comments=True))
        elif not edits and after:
            return [Edit(start, source.span(after[0])[0])]
        elif not edits:
            return [Edit(source.text.rindex(",", 0, start) if before else start, end)]
    return edits


def _tidy(text: str) -> str:
    """No two blank lines in a row, none at a block's start; a signature without parameters on one line."""
    text = re.sub(r"^(def \w+)\(\s*\)", r"\1()", text, flags=re.MULTILINE)
    source = Source(text)
    inside = {row for t in source.tokens for row in range(t.start[0] + 1, t.end[0] + 1) if t.type != tokenize.NL}
    edits, previous = [], ""
    for row, line in enumerate(source.lines[:-1], 1):
        opens = previous.split("#")[0].rstrip().endswith(":") or not previous.strip()
        if not line.strip() and opens and row not in inside:
            edits.append(source.cut(row, row))
        else:
            previous = line
    return apply(text, edits).rstrip("\n") + "\n"


def _rename(text: str, names: Mapping[str, str]) -> str:
    source = Source(text)
    start = source.text.index("def ", source.span(source.function)[0]) + len("def ")
    edits = [Edit(start, start + len(source.function.name), names.get(source.function.name, source.function.name))]
    for node in ast.walk(source.function):
        name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
        if name in names and isinstance(node, ast.Name | ast.arg):
            start, _ = source.span(node)
            edits.append(Edit(start, start + len(name), names[name]))
    return apply(text, edits)
