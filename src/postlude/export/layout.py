"""Text in 88 columns, as formatters of Python lay it out: calls broken after their bracket, long comments wrapped."""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize
from collections.abc import Sequence

WIDTH = 88


def call(function: str, arguments: Sequence[str], before: str = "", after: str = "", indent: int = 4) -> list[str]:
    """The lines of one call, or tuple where there is no function: one, or its arguments on one, or each on its own."""
    pad = " " * indent
    line = f"{pad}{before}{function}({', '.join(arguments)}){after}"
    if len(line) <= WIDTH:
        return [line]
    head, tail = f"{pad}{before}{function}(", f"{pad}){after}"
    inner = f"{pad}    {', '.join(arguments)}"
    if len(inner) <= WIDTH and function:
        return [head, inner, tail]
    return [head, *(f"{pad}    {argument}," for argument in arguments), tail]


def comment(text: str, indent: int = 4) -> list[str]:
    """A comment on lines of its own."""
    pad = " " * indent
    return textwrap.wrap(text, WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ", break_long_words=False)


def docstring(text: str, indent: int = 4) -> list[str]:
    """Its first sentence on the first line where there is room, paragraphs wrapped."""
    pad = " " * indent
    one = f'{pad}"""{text}"""'
    if len(one) <= WIDTH and "\n" not in text:
        return [one]
    first, *more = text.split("\n")
    width = WIDTH - 3 if len(first) + indent + 3 <= WIDTH else WIDTH  # the closing quotes go with the last word
    lines = textwrap.wrap(first, width, initial_indent=f'{pad}"""', subsequent_indent=pad, break_long_words=False)
    lines = lines or [f'{pad}"""']
    for part in more:
        lines += textwrap.wrap(part, WIDTH, initial_indent=pad, subsequent_indent=pad) or [""]
    if not more and len(lines[-1]) + 3 <= WIDTH:
        return [*lines[:-1], f'{lines[-1]}"""']
    return [*lines, f'{pad}"""']


def fold(text: str) -> str:
    """A function's or a class's text with every logical line brought within the width, as far as it can be."""
    lines = text.split("\n")
    for first, last in reversed(_logical_lines(text)):
        if any(len(line) > WIDTH for line in lines[first : last + 1]):
            lines[first : last + 1] = _folded(lines[first : last + 1])
    return "\n".join(lines)


def _logical_lines(text: str) -> list[tuple[int, int]]:
    """Where each begins and ends, comments on their own lines and docstrings among them."""
    found, start = [], None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        if start is None:
            start = token.start[0] - 1
        is_alone = token.type == tokenize.NL and start == token.start[0] - 1
        if token.type == tokenize.NEWLINE or is_alone:
            found.append((start, token.start[0] - 1))
            start = None
    return _joined_comments(text.split("\n"), found)


def _joined_comments(lines: list[str], found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Comments of several lines are wrapped as one."""
    joined: list[tuple[int, int]] = []
    for first, last in found:
        is_comment = lines[first].lstrip().startswith("#")
        if is_comment and joined and joined[-1][1] == first - 1 and _is_same_comment(lines, joined[-1][1], first):
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


def _is_same_comment(lines: list[str], before: int, after: int) -> bool:
    return lines[before].lstrip().startswith("#") and _indent(lines[before]) == _indent(lines[after])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _folded(lines: list[str]) -> list[str]:
    first = lines[0]
    pad = _indent(first)
    if first.lstrip().startswith("#"):
        return comment(" ".join(line.lstrip().lstrip("#").strip() for line in lines), pad)
    if first.lstrip().startswith('"""'):
        return docstring(textwrap.dedent("\n".join(lines)).strip().strip('"').rstrip(), pad)
    if len(lines) > 1:
        return [part for line in lines for part in _argument(line)]
    code, remark = _split_comment(first)
    lines = [code] if len(code) <= WIDTH else _broken(code, pad)
    if remark.startswith("[") and len(lines) > 1:  # a shape belongs to the end of the line that makes it
        return [*lines[:-1], f"{lines[-1]}  # {remark}"]
    return [*(comment(remark, pad) if remark else []), *lines]


def _argument(line: str) -> list[str]:
    """A line inside brackets, one argument: a remark behind it that is too long goes above it."""
    code, remark = _split_comment(line)
    if len(line) <= WIDTH or not remark:
        return [line]
    return [*comment(remark, _indent(line)), code]


def _split_comment(line: str) -> tuple[str, str]:
    for token in tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline):
        if token.type == tokenize.COMMENT:
            return line[: _indent(line) + token.start[1]].rstrip(), token.string.lstrip("# ")
        if token.type == tokenize.NEWLINE:
            break
    return line, ""


def _broken(code: str, pad: int) -> list[str]:
    """One statement over several lines: its last call after the bracket, anything else in parentheses."""
    text = code.strip()
    if text.startswith("def "):
        return _broken_signature(text, pad)
    try:
        statement = ast.parse(text).body[0]
    except SyntaxError:  # the head of a block
        return [code]
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.expr) or not isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.Return):
        return [code]
    start = len(text.encode()[: value.col_offset].decode())
    before, expression = text[:start], text[start:]
    if isinstance(value, ast.Call):
        parts = [ast.get_source_segment(text, part) or "" for part in (*value.args, *value.keywords)]
        return call(ast.get_source_segment(text, value.func) or "", parts, before=before, indent=pad)
    inner = value.value if isinstance(value, ast.Subscript | ast.Attribute) else None
    if isinstance(inner, ast.Call):  # of which a part is taken: the call is broken
        parts = [ast.get_source_segment(text, part) or "" for part in (*inner.args, *inner.keywords)]
        rest = text.encode()[inner.end_col_offset :].decode()
        return call(ast.get_source_segment(text, inner.func) or "", parts, before, rest, pad)
    last = value.right if isinstance(value, ast.BinOp) and not isinstance(value.left, ast.BinOp) else None
    if isinstance(last, ast.Call) and "(" in expression[: last.col_offset - value.col_offset]:
        # One operator, and a call at the end: formatters break that call.
        start = len(text.encode()[: last.col_offset].decode())
        parts = [ast.get_source_segment(text, part) or "" for part in (*last.args, *last.keywords)]
        return call(ast.get_source_segment(text, last.func) or "", parts, before=text[:start], indent=pad)
    if before and not expression.startswith("("):
        return [f"{' ' * pad}{before}(", *_operands(expression, pad + 4), f"{' ' * pad})"]
    return [code]


def _operands(expression: str, pad: int) -> list[str]:
    """An expression in parentheses: on one line, or one term of a sum a line."""
    line = " " * pad + expression
    node = ast.parse(expression, mode="eval").body
    terms: list[str] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        assert node.left.end_col_offset is not None
        rest = expression.encode()[node.left.end_col_offset : node.end_col_offset].decode()
        terms.insert(0, rest.strip())
        node = node.left
    if len(line) <= WIDTH or not terms:
        return [line]
    first = expression.encode()[: node.end_col_offset].decode()
    return [" " * pad + part for part in (first, *terms)]


def _broken_signature(text: str, pad: int) -> list[str]:
    function = ast.parse(f"{text}\n    pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    parts = ast.unparse(function.args).split(", ")
    head, tail = text[: text.index("(")], text[text.rindex(")") :]
    space = " " * pad
    inner = f"{space}    {', '.join(parts)}"
    if len(inner) <= WIDTH:
        return [f"{space}{head}(", inner, f"{space}{tail}"]
    return [f"{space}{head}(", *(f"{space}    {part}," for part in parts), f"{space}{tail}"]
