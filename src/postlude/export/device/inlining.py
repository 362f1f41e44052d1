"""The device functions of a whole file: those that read better where they are called are put there.

That is a function of one short expression, and one of a few statements with a single call. What it says of itself
becomes a comment. A word of a chain keeps its name where the chain's steps are written.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from postlude.export.device.library import Kernel, library
from postlude.export.device.sizes import with_remarks
from postlude.export.syntax.analysis import calls_in, owners, stored_names, times_read
from postlude.export.syntax.comments import with_words
from postlude.export.syntax.in_place import InPlace
from postlude.export.syntax.layout import WIDTH, fold, refilled
from postlude.export.syntax.rules import rewritten
from postlude.export.syntax.source import Comment, parameters, text_of, written
from postlude.export.syntax.specialise import simplify
from postlude.export.syntax.trees import copied, walk
from postlude.words import POINTWISE

_SHORT = 44  # characters of an expression that stands at every call
_FEW = 6  # statements that stand at the only call
_LONG = WIDTH - 12  # a statement, without its indentation
_FRESH = ("y", "u", "w", "s")  # for values that are named like another one of the caller
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)
_CHOICES = (ast.IfExp, ast.BoolOp)
Trees = dict[str, ast.FunctionDef]


@dataclass(frozen=True)
class _Place:
    """A call, the statement around it, and the function that this is in."""

    owner: ast.FunctionDef
    around: ast.stmt
    call: ast.Call


@dataclass(frozen=True)
class _Body:
    """What stands at a call: the arguments' names, a comment, statements, and the value in place of the call."""

    bound: tuple[ast.stmt, ...]
    said: tuple[Comment, ...]
    statements: tuple[ast.stmt, ...]
    value: ast.expr


def put_in_place(kernels: Sequence[Kernel]) -> dict[str, str]:
    """The texts of a file's functions, without those that were put where they are called."""
    trees = {kernel.name: with_remarks(kernel) for kernel in kernels}
    _drop_unread(trees)
    for name in reversed(list(trees)):  # callers come after what they call
        places = _places(trees, name)
        if not places or _keeps_name(name, trees, places):
            continue
        bodies = [_body(trees[name], place, len(places)) for place in places]
        if all(body is not None for body in bodies):
            for number, (place, body) in enumerate(zip(places, bodies)):
                assert body is not None
                _put(place, body, says=number == 0)
            del trees[name]
    for tree in trees.values():
        simplify(tree)
    return {name: refilled(fold(text_of(tree))) for name, tree in trees.items()}


def put_expression(trees: Trees, name: str, kernels: Collection[str]) -> bool:
    """Puts a function of one expression where one of these kernels calls it, if that is its one call; says whether."""
    places = _places(trees, name)
    if len(places) != 1 or places[0].owner.name not in kernels or name in POINTWISE:
        return False
    body = _body(trees[name], places[0], calls=1)
    if body is None or body.bound or body.statements:
        return False
    _put(places[0], body, says=True)
    del trees[name]
    return True


def _drop_unread(trees: Trees) -> None:
    """Removes parameters that a function does not read from it and its calls, and sizes that a kernel does not read."""
    for name, tree in trees.items():  # callers come after what they call
        calls = list(_calls(trees, name))
        read = times_read(*tree.body)
        kept = [
            (arg, default) for arg, default in parameters(tree) if arg.arg in read or (not calls and default is None)
        ]
        places = [tree.args.args.index(arg) for arg, _ in kept]
        tree.args.args = [arg for arg, _ in kept]
        tree.args.defaults = [default for _, default in kept if default is not None]
        for call in calls:
            call.args = [call.args[place] for place in places]


def _calls(trees: Trees, name: str) -> Iterator[ast.Call]:
    return (call for tree in trees.values() for call in calls_in(tree, name))


def _places(trees: Trees, name: str) -> list[_Place]:
    """The calls of a function; none if one of them is not in a simple statement, not always made, or an argument of
    another one, which would move it."""
    found, count = [], 0
    for owner in trees.values():
        calls = calls_in(owner, name)
        count += len(calls)
        if any(part in calls for call in calls for argument in call.args for part in walk(argument)):
            return []
        for around in (node for node in walk(owner) if isinstance(node, _SIMPLE)):
            inside = list(walk(around))
            if not any(isinstance(part, _CHOICES) for part in inside):
                found += [_Place(owner, around, call) for call in calls if call in inside]
    return found if len(found) == count else []


def _keeps_name(name: str, trees: Trees, places: Sequence[_Place]) -> bool:
    """Whether it is a word that a kernel or its composed steps call."""
    callers = {place.owner.name for place in places}
    return name in POINTWISE and any(caller not in library() or not any(_calls(trees, caller)) for caller in callers)


def _body(function: ast.FunctionDef, place: _Place, calls: int) -> _Body | None:
    """What stands at one of its calls; None if the function has to stay one."""
    *body, last = copied(function.body)
    said = [" ".join(node.text.strip('"# ').split()) for node in body if isinstance(node, Comment)]
    body = [node for node in body if not isinstance(node, Comment)]
    if not isinstance(last, ast.Return) or last.value is None or isinstance(last.value, ast.Tuple):
        return None
    if not all(isinstance(node, _SIMPLE) for node in body):
        return None
    if len(body) > _FEW or (calls > 1 and (body or len(written(last.value)) > _SHORT)) or place.call.keywords:
        return None
    names = _Names(function, place)
    words = names.words([*body, last], " ".join(said) if body else "")
    if words is None:
        return None
    change = InPlace(words)
    statements, value = [change.visit(node) for node in body], change.visit(last.value)
    if _length(place, value) > _LONG and place.around.value is not place.call:  # type: ignore[attr-defined]
        word = names.fresh()
        if calls > 1 or word is None:
            return None
        statements.append(ast.Assign([ast.Name(word, ast.Store())], value, lineno=0))
        value = ast.Name(word, ast.Load())
    plain = {name: part.id for name, part in words.items() if isinstance(part, ast.Name)}
    comments = tuple(Comment(f"# {with_words(text, plain)}") for text in said if text)
    return _Body(tuple(names.bound), comments, tuple(statements), value)


def _length(place: _Place, value: ast.expr) -> int:
    return len(written(place.around)) - len(written(place.call)) + len(written(value))


def _put(place: _Place, body: _Body, says: bool) -> None:
    _Exchanged(place.call, body.value).visit(place.around)
    above = [*body.bound, *(body.said if says else ()), *body.statements]
    changed = rewritten(place.owner.body, lambda node: [*above, node] if node is place.around else [node])
    place.owner.body = changed


class _Names:
    """Names for what a function's parameters and locals are at a call."""

    def __init__(self, function: ast.FunctionDef, place: _Place) -> None:
        self.function, self.place = function, place
        self.bound: list[ast.stmt] = []
        inner = {node.id for node in walk(function) if isinstance(node, ast.Name)}
        self.outer = {node.id for node in walk(place.owner) if isinstance(node, ast.Name)}
        self.outer |= {arg.arg for arg in place.owner.args.args}
        self.left = iter([name for name in _FRESH if name not in inner | self.outer])

    def fresh(self) -> str | None:
        return next(self.left, None)

    def words(self, body: Sequence[ast.stmt], said: str) -> dict[str, ast.expr] | None:
        """By name: an argument that is a name, a number or read once stays as it is; others get a name, and so do those
        that are said something about."""
        found: dict[str, ast.expr] = {}
        reads, stored = times_read(*body), set[str]().union(*map(stored_names, body))
        owned = owners(self.function)
        for parameter, argument in zip((arg.arg for arg in self.function.args.args), self.place.call.args, strict=True):
            is_number = isinstance(argument, ast.Constant) and parameter not in owned
            is_plain = isinstance(argument, ast.Name) or is_number
            is_said = parameter in said.replace("`", " ").replace(",", " ").split()
            if parameter not in stored and (is_plain or (reads[parameter] <= 1 and not is_said)):
                found[parameter] = argument
                continue
            word = parameter if parameter not in self.outer else self.fresh()
            if word is None:
                return None
            found[parameter] = ast.Name(word, ast.Load())
            self.bound.append(ast.Assign([ast.Name(word, ast.Store())], argument, lineno=0))
        for name in sorted(stored - found.keys()):
            word = name if name not in self.outer else self.fresh()
            if word is None:
                return None
            found[name] = ast.Name(word, ast.Load())
        return found


class _Exchanged(ast.NodeTransformer):
    def __init__(self, call: ast.Call, value: ast.expr) -> None:
        self.call, self.value = call, value

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.value if node is self.call else self.generic_visit(node)
