"""The rules by which a function's text is cut down: each finds edits in the text as it stands, or none."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping

from postlude.export.analysis import (
    SCALAR,
    UNKNOWN,
    WHOLE,
    Kinds,
    Liveness,
    is_pure,
    name_of,
    never_runs,
    stores,
    value_of,
)
from postlude.export.case import Case, Inline, Name
from postlude.export.comments import with_words
from postlude.export.source import Edit, Source

_ADDRESSED = ("tl.load", "tl.store", "tl.atomic_add", "tl.atomic_max", "tl.atomic_min")
_JUMPS = (ast.Return, ast.Break, ast.Continue, ast.Raise)


def substitute(source: Source, case: Case) -> Iterator[Edit]:
    assigned = stores(source.function)
    for node in _expressions(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            inline = case.decided.get(node.func.id)
            if isinstance(inline, Inline):
                yield source.replace(node, inline.text.format(*map(source.segment, node.args)))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in case.decided:
            value = case.decided[node.id]
            if not isinstance(value, Inline) and _is_parameter(source, node, assigned.get(node.id)):
                yield source.replace(node, literal(value, source.parents[node]))


def _is_parameter(source: Source, node: ast.Name, places: list[tuple[ast.stmt, ast.expr | None]] | None) -> bool:
    """Whether the parameter is read, not what the function itself has put under its name by then."""
    if not places:
        return True
    first, value = min(places, key=lambda place: place[0].lineno)
    if value is None or first not in source.function.body:
        raise ValueError(f"{node.id} is decided, and assigned in line {first.lineno} of the text")
    return source.span(node)[1] <= source.span(first)[1]


def literal(value: object, parent: ast.AST | None = None) -> str:
    if isinstance(value, Name):
        return value.text
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    text = repr(value)
    is_inside = isinstance(parent, ast.BinOp | ast.UnaryOp) and text.startswith("-")
    return f"({text})" if is_inside or isinstance(parent, ast.Attribute) else text


def fold(source: Source, case: Case) -> Iterator[Edit]:
    known, tests = _known(source, case), _tests(source.function)
    kinds = Kinds(source.function, known)
    for node in _expressions(source):
        text = None
        if isinstance(node, ast.BinOp | ast.Compare | ast.BoolOp) or _is_not(node):
            value = value_of(node, {})
            text = None if value is UNKNOWN else literal(value, source.parents[node])
        if text is None and isinstance(node, ast.BinOp):
            text = _identity(source, node, kinds)
        elif text is None and isinstance(node, ast.BoolOp):
            text = _without_known(source, node, known, node in tests)
        elif isinstance(node, ast.IfExp) and (value := value_of(node.test, known)) is not UNKNOWN:
            text = source.operand(node.body if value else node.orelse)
        elif isinstance(node, ast.Call) and _is_same_shape(source, node):
            text = source.segment(node.args[0])
        if text is not None:
            yield source.replace(node, text)


def _is_same_shape(source: Source, node: ast.Call) -> bool:
    """A reshape of an accumulator to the shape that it started with; what a loop carries on keeps its shape."""
    if name_of(node.func) != "tl.reshape" or len(node.args) != 2 or not isinstance(node.args[0], ast.Name):
        return False
    places = stores(source.function).get(node.args[0].id)
    if not places or not isinstance(first := places[0][1], ast.Call) or name_of(first.func) != "tl.zeros":
        return False
    around = source.parents[places[0][0]]
    loops = [source.parents[statement] for statement, _ in places[1:]]
    is_carried = all(isinstance(loop, ast.For) and source.parents[loop] is around for loop in loops)
    return is_carried and ast.unparse(first.args[0]) == ast.unparse(node.args[1])


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _identity(source: Source, node: ast.BinOp, kinds: Kinds) -> str | None:
    left, right, op = value_of(node.left, {}), value_of(node.right, {}), node.op
    number, other = (right, node.left) if type(right) is int else (left, node.right)
    if type(number) is not int or number not in (0, 1):
        return None
    is_right, kind = other is node.left, kinds(other)
    is_nothing = (isinstance(op, ast.Mult) and number == 0) or (isinstance(op, ast.Mod) and number == 1 and is_right)
    if is_nothing and kind >= SCALAR:
        return "0"
    is_one = number == 1 and (isinstance(op, ast.Mult) or (isinstance(op, ast.FloorDiv) and is_right))
    is_zero = number == 0 and (isinstance(op, ast.Add) or (isinstance(op, ast.Sub) and is_right))
    if (is_one and kind >= WHOLE) or (is_zero and (kind >= WHOLE or _is_address(source, node))):
        return source.operand(other)
    return None


def _is_address(source: Source, node: ast.AST) -> bool:
    """Part of the sum of a pointer and offsets: a 0 in it has no sign to lose."""
    while isinstance(parent := source.parents[node], ast.BinOp) and isinstance(parent.op, ast.Add | ast.Sub):
        node = parent
    return isinstance(parent, ast.Call) and name_of(parent.func) in _ADDRESSED and parent.args[:1] == [node]


def _without_known(source: Source, node: ast.BoolOp, known: Mapping[str, object], is_test: bool) -> str | None:
    """Operands that are known are left out where they do not decide, in conditions also behind others."""
    stops = isinstance(node.op, ast.Or)
    left: list[str] = []
    unseen = True
    for part in node.values:
        value = value_of(part, known)
        if value is not UNKNOWN and bool(value) is stops and unseen and is_test:
            return str(stops)
        if value is UNKNOWN or bool(value) is stops or (left and not is_test):
            left.append(source.operand(part))
            unseen = unseen and is_pure(part)
    changed = 0 < len(left) < len(node.values)
    return (" or " if stops else " and ").join(left) if changed else None


def _tests(function: ast.FunctionDef) -> set[ast.expr]:
    """Expressions of which only the truth matters."""
    found: set[ast.expr] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            found.add(node.test)
        if isinstance(node, ast.BoolOp) and node in found:
            found.update(node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found.add(node.operand)
    return found


def decide(source: Source, case: Case) -> list[Edit]:
    """Conditions that are known, all that do not lie inside one another."""
    known = _known(source, case)
    edits: list[Edit] = []
    done: set[int] = set()
    for node in ast.walk(source.function):
        if isinstance(node, ast.If) and (value := value_of(node.test, known)) is not UNKNOWN:
            assert node.end_lineno is not None
            lines = set(range(node.lineno, source.block_end(node, node.col_offset) + 1))
            is_chained = source.segment(node).startswith("elif") or bool(node.orelse and _is_elif(source, node))
            if done.isdisjoint(lines) and not (is_chained and edits):
                edits += _taken(source, node, bool(value))
                done |= lines
            if is_chained:
                break
    return edits


def _is_elif(source: Source, node: ast.If) -> bool:
    return source.segment(node.orelse[0]).startswith("elif")


def _taken(source: Source, node: ast.If, truth: bool) -> list[Edit]:
    assert node.test.end_lineno is not None
    head, column = source.line_end(node.test.end_lineno), node.col_offset
    if node.body[0].lineno <= head:
        raise ValueError(f"line {head} of the text: a decided `if` must have its body below it")
    last, is_elif = source.block_end(node, column), source.segment(node).startswith("elif")
    body_end = source.block_end(node.body[-1], column)
    if not node.orelse:
        first, end = (head + 1, last) if truth else (0, 0)
    elif truth:
        first, end = head + 1, body_end
    elif source.segment(node.orelse[0]).startswith("elif") and node.orelse[0].col_offset == column:
        start = source.span(node.orelse[0])[0]
        shorter = [] if is_elif else [Edit(start, start + 2)]
        return [source.cut(node.lineno, node.orelse[0].lineno - 1), *shorter]
    else:
        above = [t for t in source.tokens if t.string == "else" and body_end < t.start[0] < node.orelse[0].lineno]
        first, end = source.line_end(above[0].start[0]) + 1, last
        if is_elif:
            return [source.cut(node.lineno, above[0].start[0] - 1)]
    if is_elif and truth:
        otherwise = Edit(source.starts[node.lineno - 1], source.starts[head], " " * column + "else:\n")
        return [otherwise, source.cut(end + 1, last)]
    if not first:
        return [source.cut(node.lineno, last) if is_elif else source.remove(node)]
    step = node.body[0].col_offset - column
    return [source.cut(node.lineno, first - 1), *source.dedent(first, end, step), source.cut(end + 1, last)]


def leave_out(source: Source, _: Case) -> list[Edit]:
    """Assignments that nobody reads, what comes after a jump, and blocks that do nothing."""
    for node in ast.walk(source.function):
        if isinstance(node, ast.stmt) and node is not source.function and _does_nothing(source, node):
            if isinstance(node, ast.If) and source.segment(node).startswith("elif"):
                continue
            return [source.remove(node)]
        if isinstance(node, ast.If) and _is_empty(node.orelse):
            body_end = source.block_end(node.body[-1], node.col_offset)
            return [source.cut(body_end + 1, source.block_end(node, node.col_offset))]
    blocks: dict[int, int] = {}  # statements that a block has left
    edits: list[Edit] = []
    for node in Liveness(source.function).dead:
        block = source.block_of(node)
        left = blocks.setdefault(id(block), len(block))
        if left > 1 or not edits:
            edits.append(source.remove(node))
            blocks[id(block)] = left - 1
            if left == 1:
                break
    return edits


def _does_nothing(source: Source, node: ast.stmt) -> bool:
    block = source.block_of(node)
    if any(isinstance(before, _JUMPS) for before in block[: block.index(node)]):
        return True
    if isinstance(node, ast.Pass):
        return len(block) > 1
    if isinstance(node, ast.For) and never_runs(node):
        return True
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
        return [ast.unparse(target) for target in node.targets] == [node.value.id]
    if not isinstance(node, ast.If | ast.For) or node.orelse or not is_pure(node):
        return False
    if isinstance(node, ast.If):
        return _is_empty(node.body)
    loads = [n for n in ast.walk(source.function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    return _is_empty(node.body) and ast.unparse(node.target) not in {name.id for name in loads}


def _is_empty(block: list[ast.stmt]) -> bool:
    return len(block) == 1 and isinstance(block[0], ast.Pass)


def propagate(source: Source, case: Case) -> Iterator[Edit]:
    """Locals that are only another name for a flag, for 0 or 1, or for another local."""
    singles = _singles(source, case)
    words = {}
    for name, value in singles.items():
        constant = value_of(value, {})
        is_copy = isinstance(value, ast.Name) and (value.id in singles or value.id in _unassigned(source))
        if is_copy or isinstance(constant, bool | str) or (type(constant) is int and constant in (0, 1)):
            words[name] = source.segment(value)
    words = {name: text for name, text in words.items() if text not in words}
    for node in _expressions(source):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in words:
            text = words[node.id]
            is_owner = isinstance(source.parents[node], ast.Attribute)  # 0.to is no Python
            if text.isidentifier() or not is_owner:
                yield source.replace(node, text)
    capitals = {name: text for name, text in words.items() if name.isupper()}
    for row, token in source.comments.items():
        text = with_words(token.string, capitals)
        if text != token.string:
            start = source.starts[row - 1] + token.start[1]
            yield Edit(start, start + len(token.string), text)


def _expressions(source: Source) -> Iterator[ast.expr]:
    """Of the body, inner ones first."""

    def inner_first(node: ast.AST) -> Iterator[ast.expr]:
        for child in ast.iter_child_nodes(node):
            yield from inner_first(child)
        if isinstance(node, ast.expr):
            yield node

    for statement in source.function.body:
        yield from inner_first(statement)


def _known(source: Source, case: Case) -> dict[str, object]:
    """Constants that the body does not overwrite, and locals with one value."""
    assigned = stores(source.function)
    known = {name: value for name, value in case.known.items() if name not in assigned}
    for name, expression in _singles(source, case).items():
        value = value_of(expression, known)
        if value is not UNKNOWN:
            known[name] = value
    return {name: value for name, value in known.items() if not isinstance(value, Name | Inline)}


def _singles(source: Source, case: Case) -> dict[str, ast.expr]:
    """Locals that are assigned once."""
    parameters = {arg.arg for arg in source.function.args.args} - set(case.decided)
    found = {}
    for name, places in stores(source.function).items():
        value = places[0][1]
        if len(places) == 1 and value is not None and name not in parameters:
            found[name] = value
    return found


def _unassigned(source: Source) -> set[str]:
    return {arg.arg for arg in source.function.args.args} - set(stores(source.function))
