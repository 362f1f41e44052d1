"""Parses a function's text to a syntax tree that keeps comments and blank lines, and writes the tree as text again.

The text has one line per statement, however long; `layout.fold` breaks long ones. What Python's tree does not hold is
kept as attributes of its nodes: `remark`, the comment after a statement or a parameter, and `is_grouped`, for an
operation in parentheses.
"""

from __future__ import annotations

import ast
import copy
import io
import itertools
import json
import math
import re
import tokenize
from collections.abc import Sequence

from postlude.export.syntax.layout import laid_out
from postlude.export.syntax.trees import copied, walk


class Comment(ast.stmt):
    """A docstring, or a comment on a line of its own; a blank line where the text is empty."""

    _fields = ("text",)

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.text = text


def parse(text: str) -> ast.FunctionDef:
    plain, remarks = _with_marks(text)
    module = ast.parse(plain)
    if len(module.body) != 1 or not isinstance(function := module.body[0], ast.FunctionDef):
        raise ValueError("the text is not that of one function")
    last, before = function.lineno - 1, None
    for arg, default in parameters(function):
        end = (default or arg).end_lineno or last
        if before is not None:  # lines of comment below a parameter go on with its remark
            more = [remarks[row] for row in range(last + 1, arg.lineno) if row in remarks]
            vars(before)["remark"] = " ".join([remark_of(before), *more]).strip()
        found = [remarks[row] for row in range(min(arg.lineno, end), end + 1) if row in remarks]
        # A shape applies to all parameters of its line; any other remark belongs to the first.
        vars(arg)["remark"] = " ".join(words for words in found if end > last or words.startswith("["))
        last, before = end, arg
    starts = [0, *itertools.accumulate(len(line) + 1 for line in plain.split("\n"))]
    for node in walk(function):
        if isinstance(node, ast.BinOp):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            vars(node)["is_grouped"] = plain[last : last + 1] == ")" and plain[first - 1] == "(" and not re.match(
                r"[\w)\]]", plain[first - 2])  # fmt: skip
        elif isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            rows = range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1)
            vars(node)["remark"] = " ".join(remarks[row] for row in rows if row in remarks)
    _Unmarked().visit(function)
    return function


def _with_marks(text: str) -> tuple[str, dict[int, str]]:
    """The text with comments and blank lines between its statements as strings, and the other comments by their row."""
    lines, depth, remarks = text.split("\n"), 0, dict[int, str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        elif token.type == tokenize.COMMENT:
            words = token.string.removeprefix("#").strip()
            is_alone = not depth and not lines[row - 1][:column].strip()
            lines[row - 1] = lines[row - 1][:column] + (repr(f"# {words}") if is_alone else "")
            if not is_alone:
                remarks[row] = words
        elif token.type == tokenize.NL and not depth and not token.line.strip():
            following = next((line for line in lines[row:] if line.strip()), "")
            is_inside = following.startswith(" ") and not re.match(r" *(?:else|elif)\b", following)
            lines[row - 1] = re.sub(r"\S.*", "''", following) if is_inside else ""
    return "\n".join(lines), remarks


class _Unmarked(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if not isinstance(node.value, ast.Constant) or not isinstance(text := node.value.value, str):
            return node
        is_docstring = text != "" and not text.startswith("# ")
        return Comment(f'"""{text}"""' if is_docstring else text)


def parameters(function: ast.FunctionDef) -> list[tuple[ast.arg, ast.expr | None]]:
    """The parameters with their defaults."""
    arguments = function.args
    missing = len(arguments.args) - len(arguments.defaults)
    return list(zip(arguments.args, [*[None] * missing, *arguments.defaults]))


def parameter_names(function: ast.FunctionDef) -> list[str]:
    return [arg.arg for arg in function.args.args]


def remark_of(node: ast.AST) -> str:
    return str(vars(node).get("remark", ""))


def text_of(function: ast.FunctionDef) -> str:
    lines = [f"@{written(decorator)}" for decorator in function.decorator_list]
    words = []
    for arg, default in parameters(function):
        sign = " = " if arg.annotation is not None else "="
        words.append(ast.unparse(arg) + (f"{sign}{written(default)}" if default is not None else ""))
    if any(remark_of(arg) for arg in function.args.args):
        remarks = [_remark(arg) for arg in function.args.args]
        lines += [f"def {function.name}(", *(f"    {w},{remark}" for w, remark in zip(words, remarks)), "):"]
    else:
        lines += laid_out(f"def {function.name}", words, after=":", indent=0)
    return "\n".join([*lines, *_block(function.body, 4)]) + "\n"


def _remark(node: ast.AST) -> str:
    return f"  # {remark_of(node)}" if remark_of(node) else ""


def _block(block: Sequence[ast.stmt], indent: int) -> list[str]:
    """The lines of a block, without blank lines at its start or end and without two in a row."""
    lines: list[str] = []
    for node in block:
        is_blank = isinstance(node, Comment) and not node.text
        if not isinstance(node, ast.Pass) and not (is_blank and (not lines or not lines[-1])):
            lines += _statement(node, indent)
    while lines and not lines[-1]:
        lines.pop()
    return lines if not is_empty(block) else [*lines, f"{' ' * indent}pass"]


def is_empty(block: Sequence[ast.stmt]) -> bool:
    return all(isinstance(node, Comment | ast.Pass) for node in block)


def _statement(node: ast.stmt, indent: int) -> list[str]:
    pad = " " * indent
    if isinstance(node, Comment):
        return [f"{pad}{node.text}" if node.text else ""]
    if not isinstance(node, ast.If | ast.For | ast.While):
        return [f"{pad}{written(node)}{_remark(node)}"]
    bare = copy.copy(node)
    bare.body, bare.orelse = [ast.Pass()], []
    lines = [f"{pad}{written(bare).splitlines()[0]}{_remark(node)}", *_block(node.body, indent + 4)]
    if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        first, *others = _statement(node.orelse[0], indent)
        return [*lines, f"{pad}el{first.strip()}", *others]
    return [*lines, f"{pad}else:", *_block(node.orelse, indent + 4)] if node.orelse else lines


def written(node: ast.AST) -> str:
    """An expression or a simple statement in the style of Python's formatters."""
    return ast.unparse(_Written().visit(copied(node)))


class _Written(ast.NodeTransformer):
    """Replaces nodes by ready-made text where the style of ast.unparse differs from that of formatters."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str):
            return ast.Name(json.dumps(node.value, ensure_ascii=False))
        if isinstance(node.value, float) and not math.isfinite(node.value):
            return ast.Name(f'float("{node.value}")')
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        for side in ("left", "right"):
            part = self.visit(getattr(node, side))
            is_grouped = isinstance(part, ast.BinOp) and vars(part).get("is_grouped", False)
            setattr(node, side, ast.Name(f"({ast.unparse(part)})") if is_grouped else part)
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        return ast.Name(f"({self._elements(node)})")

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        node.value, node.slice = self.visit(node.value), self._bare(node.slice)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        is_parallel = isinstance(node.targets[0], ast.Tuple)
        node.targets = [self._bare(target) for target in node.targets]
        node.value = self._bare(node.value) if is_parallel else self.visit(node.value)
        return node

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        node.value = None if node.value is None else self._bare(node.value)
        return node

    def _bare(self, node: ast.expr) -> ast.expr:
        """A tuple without its parentheses, which versions of Python write in different places."""
        is_bare = isinstance(node, ast.Tuple) and len(node.elts) > 1
        return ast.Name(self._elements(node)) if is_bare else self.visit(node)  # type: ignore[arg-type]

    def _elements(self, node: ast.Tuple) -> str:
        return ", ".join(ast.unparse(self.visit(part)) for part in node.elts) + "," * (len(node.elts) == 1)
