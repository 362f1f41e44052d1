"""A problem's file in the form that the exporter edits: the model is named ModelNew, a line holds one statement, each
level is indented by four spaces, and a body begins below its header.

Most files have that form and stay as they are. A statement in another form is printed from its syntax tree, which
loses its comments.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
from collections.abc import Iterator, Sequence

MODEL, NEW = "Model", "ModelNew"
_INDENT = 4


def plain_source(source: str) -> str:
    """The text in that form. It means the same, but for the model's name."""
    rows = _rows(source)
    tree = ast.parse("\n".join(rows))
    for row, start in sorted(_mentions(tree, rows), reverse=True):
        line = rows[row].encode()  # the tree counts bytes
        rows[row] = (line[:start] + NEW.encode() + line[start + len(MODEL) :]).decode()
    rows = [line.replace(f"super({NEW}, self).__init__(", "super().__init__(") for line in rows]
    tree = ast.parse("\n".join(rows))
    plain = "\n".join(_plain_block(tree.body, rows, 1, len(rows), 0)) + "\n"
    return plain if same_but_docstrings(plain, tree) else ast.unparse(tree) + "\n"


def same_but_docstrings(text: str, other: str | ast.Module) -> bool:
    """Whether two texts have the same syntax tree, docstrings left out."""
    try:
        return _without_docstrings(text) == _without_docstrings(other)
    except SyntaxError:
        return False


def _without_docstrings(text: str | ast.Module) -> str:
    tree = ast.parse(text if isinstance(text, str) else ast.unparse(text))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not is_docstring(statement)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def first_row(node: ast.stmt) -> int:
    """The line on which a statement begins, with its decorators; lines are counted from 1."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _rows(source: str) -> list[str]:
    """The lines as Python counts them. str.splitlines would also end a line at a form feed."""
    return [line.rstrip("\n") for line in io.StringIO(source.replace("\f", ""), newline=None)]


def _mentions(tree: ast.Module, rows: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Row and byte of each place that names the model's class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == MODEL:
            yield node.lineno - 1, node.col_offset
        elif isinstance(node, ast.ClassDef) and node.name == MODEL:
            found = re.compile(rb"class\s+").match(rows[node.lineno - 1].encode(), node.col_offset)
            if found is not None:
                yield node.lineno - 1, found.end()


def _plain_block(body: Sequence[ast.stmt], rows: Sequence[str], start: int, end: int, level: int) -> list[str]:
    """The lines from `start` to `end` with the statements of a module or class among them, each in the plain form."""
    lines = list[str]()
    for node in body:
        lines += [line.rstrip() for line in rows[start - 1 : first_row(node) - 1]]  # comments and blank lines
        lines += _plain(node, rows, level)
        start = (node.end_lineno or node.lineno) + 1
    return [*lines, *(line.rstrip() for line in rows[start - 1 : end])]


def _plain(node: ast.stmt, rows: Sequence[str], level: int) -> list[str]:
    end = node.end_lineno or node.lineno
    if _is_plain([node], rows, level):
        return [line.rstrip() for line in rows[first_row(node) - 1 : end]]
    if isinstance(node, ast.ClassDef) and all(_stands_alone(inner, rows, level + 1) for inner in node.body):
        head = [line.rstrip() for line in rows[first_row(node) - 1 : first_row(node.body[0]) - 1]]
        return [*head, *_plain_block(node.body, rows, first_row(node.body[0]), end, level + 1)]
    return textwrap.indent(ast.unparse(node), " " * _INDENT * level).splitlines()


def _is_plain(body: Sequence[ast.stmt], rows: Sequence[str], level: int) -> bool:
    """Whether these statements, and all inside them, have the plain form."""
    for node in body:
        is_elif = rows[node.lineno - 1].lstrip().startswith("elif")
        if not _stands_alone(node, rows, level - is_elif):
            return False
        cases = [*getattr(node, "handlers", []), *getattr(node, "cases", [])]
        deeper = [getattr(node, "body", []), *(case.body for case in cases)]
        deeper += [getattr(node, "orelse", []), getattr(node, "finalbody", [])]
        inside = level + 1 - is_elif + bool(getattr(node, "cases", []))
        if not all(_is_plain(block, rows, inside) for block in deeper):
            return False
    return True


def _stands_alone(node: ast.stmt, rows: Sequence[str], level: int) -> bool:
    """Whether a statement begins its line, at the level's indentation, and nothing follows it on its last line."""
    end = node.end_lineno or node.lineno
    before = rows[node.lineno - 1].encode()[: node.col_offset]
    after = rows[end - 1].encode()[node.end_col_offset :].strip()
    return before == b" " * _INDENT * level and (not after or after.startswith(b"#"))
