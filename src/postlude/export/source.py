"""One function's text with its syntax tree: where nodes lie, and edits of the text by span and by line.

Working on the text, not on the tree, keeps comments and the way that lines are broken.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass

_ATOMS = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.List)
_TAKES_ANY = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.keyword, ast.List)
# Parts whose text without parentheses would mean something else.
_BARE = (ast.Tuple, ast.NamedExpr, ast.GeneratorExp, ast.Yield, ast.Starred)


@dataclass(frozen=True)
class Edit:
    start: int
    end: int
    text: str = ""


class Source:
    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        module = ast.parse(text)
        if len(module.body) != 1 or not isinstance(module.body[0], ast.FunctionDef):
            raise ValueError("the text is not that of one function")
        self.function = module.body[0]
        self.parents = {child: node for node in ast.walk(module) for child in ast.iter_child_nodes(node)}
        self.tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        self.comments = {t.start[0]: t for t in self.tokens if t.type == tokenize.COMMENT}
        self._comment_lines = {row for row, t in self.comments.items() if not t.line[: t.start[1]].strip()}

    def offset(self, line: int, column: int) -> int:
        """`column` as the tree has it, in bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt | ast.arg) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def segment(self, node: ast.expr | ast.stmt | ast.arg) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def operand(self, node: ast.expr) -> str:
        """An operand of an operator, with the parentheses around it."""
        parent = self.parents[node]
        assert isinstance(parent, ast.expr)
        (low, high), (start, end) = self.span(parent), self.span(node)
        while (wider := self._around(start, end)) and low <= wider[0] and wider[1] <= high:
            start, end = wider
        return self.text[start:end]

    def replace(self, node: ast.expr, text: str) -> Edit:
        """Also takes out the parentheses that the new text needs no longer."""
        start, end = self.span(node)
        parent = self.parents[node]
        if is_atom(text):
            while (wider := self._around(start, end)) and self._is_grouping(*wider, text):
                start, end = wider
        elif isinstance(parent, _TAKES_ANY) or (isinstance(parent, ast.Call) and node is not parent.func):
            text = _unwrapped(text)
        return Edit(start, end, text)

    def _around(self, start: int, end: int) -> tuple[int, int] | None:
        before = self.text[:start].rstrip()
        after = len(self.text) - len(self.text[end:].lstrip())
        return (len(before) - 1, after + 1) if before.endswith("(") and self.text[after] == ")" else None

    def _is_grouping(self, start: int, end: int, text: str) -> bool:
        is_call = bool(re.match(r"[\w)\]\"']", self.text[start - 1]))
        return not is_call and not (text[0].isdigit() and self.text[end] == ".")

    def block_of(self, node: ast.stmt) -> list[ast.stmt]:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(self.parents[node], name, None)
            if isinstance(block, list) and node in block:
                return block
        raise ValueError(f"line {node.lineno} belongs to no block")

    def line_end(self, line: int) -> int:
        """The last line of the logical line that goes on in `line`."""
        return next(t.start[0] for t in self.tokens if t.type == tokenize.NEWLINE and t.start[0] >= line)

    def block_end(self, node: ast.stmt, column: int) -> int:
        """The last line of a block that ends in `node`, with comments further right than `column`."""
        assert node.end_lineno is not None
        end = node.end_lineno
        for line in range(end + 1, len(self.lines) + 1):
            text = self.lines[line - 1]
            if line in self._comment_lines and len(text) - len(text.lstrip()) > column:
                end = line
            elif text.strip():
                break
        return end

    def cut(self, first: int, last: int, with_comments: bool = False) -> Edit:
        """Takes lines out; `with_comments` also the comments directly above."""
        while with_comments and first - 1 in self._comment_lines:
            first -= 1
        return Edit(self.starts[first - 1], max(self.starts[first - 1], self.starts[last]))

    def remove(self, node: ast.stmt) -> Edit:
        """The statement with its comments; `pass` in its place where it is its block's only one."""
        if self.block_of(node) == [node] and not isinstance(node, ast.Pass):
            return Edit(self.span(node)[0], self.starts[self.block_end(node, node.col_offset)] - 1, "pass")
        return self.cut(node.lineno, self.block_end(node, node.col_offset), with_comments=True)

    def dedent(self, first: int, last: int, step: int) -> list[Edit]:
        """Lines inside a string stay where they are."""
        inside = {
            line
            for node in ast.walk(self.function)
            if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno is not None
            for line in range(node.lineno + 1, node.end_lineno + 1)
        }
        lines = [
            line for line in range(first, last + 1) if line not in inside and self.lines[line - 1][:step].isspace()
        ]
        return [Edit(self.starts[line - 1], self.starts[line - 1] + step) for line in lines]


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Of edits that overlap, the first; a caller that goes on until there are none comes to the others."""
    taken: list[Edit] = []
    for edit in edits:
        if all(edit.end <= other.start or other.end <= edit.start for other in taken):
            taken.append(edit)
    for edit in sorted(taken, key=lambda e: e.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def is_atom(text: str) -> bool:
    return isinstance(_parsed(text), _ATOMS)


def _unwrapped(text: str) -> str:
    inner, whole = _parsed(text[1:-1]), _parsed(text)
    is_wrapped = text.startswith("(") and inner is not None and whole is not None and _is_balanced(text[1:-1])
    if not is_wrapped or "\n" in text or isinstance(inner, _BARE):
        return text
    return text[1:-1] if ast.dump(inner) == ast.dump(whole) else text  # type: ignore[arg-type]


def _is_balanced(text: str) -> bool:
    """Whether no bracket is closed that the text has not opened: `a)(b` stands inside of one for itself."""
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return False
    return depth == 0


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(f"({text}\n)", mode="eval").body
    except SyntaxError:
        return None
