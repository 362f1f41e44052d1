"""The facts of a function's expressions, found by joining what is assigned to each name until nothing changes."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from postlude.export.syntax.analysis import stored_names
from postlude.export.syntax.fact_rules import Rules
from postlude.export.syntax.facts import Fact, bounded, joined
from postlude.export.syntax.trees import walk

_ROUNDS = 4  # after these, bounds that still grow are given up


class _UnreachedError(Exception):
    """A name is read of which nothing is known yet."""


class Known:
    """The facts of a function's expressions. `given` are those of its parameters, `grid` is the launch's, and `called`
    tells what a device function returns for arguments."""

    def __init__(
        self,
        function: ast.FunctionDef,
        given: Mapping[str, Fact],
        grid: Sequence[int] = (),
        called: Callable[[str, tuple[Fact, ...]], tuple[Fact, ...]] = lambda *_: (),
    ) -> None:
        self.grid, self.called = grid, called
        self.rules = Rules(self)
        self.given = {arg.arg: given.get(arg.arg, Fact()) for arg in function.args.args}
        self.names: dict[str, Fact] = dict(self.given)
        self.seen: dict[ast.expr, Fact] = {}
        self._settle(function)
        self.is_settled = True

    is_settled = False

    def __call__(self, node: ast.expr) -> Fact:
        if node in self.seen:
            return self.seen[node]
        found = bounded(self.rules.of(node))
        if self.is_settled:
            self.seen[node] = found
        return found

    def name(self, word: str) -> Fact:
        if word in self.names:
            return self.names[word]
        if self.is_settled or word not in self.assigned:
            return Fact()
        raise _UnreachedError

    def _settle(self, function: ast.FunctionDef) -> None:
        """Joins what is assigned to each name until nothing changes."""
        statements = list(in_order(function.body))
        self.assigned = set[str]().union(*map(stored_names, function.body))
        before, rounds = dict[str, Fact](), 0
        while self.names != before:
            before, rounds = dict(self.names), rounds + 1
            for statement in statements:
                for word, fact in self._assigned(statement):
                    self._join(word, fact, widens=rounds > _ROUNDS)

    def _join(self, word: str, fact: Fact, widens: bool) -> None:
        before = self.names.get(word)
        after = fact if before is None else joined(before, fact)
        if before is not None and widens and (after.low, after.high) != (before.low, before.high):
            after = replace(after, low=-math.inf, high=math.inf)
        self.names[word] = after

    def _assigned(self, node: ast.stmt) -> list[tuple[str, Fact]]:
        """The names that a statement assigns, and what it assigns, as far as that is known."""
        if isinstance(node, ast.For):
            pairs: list[tuple[ast.expr, ast.expr | None]] = [(node.target, node.iter)]
        elif isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
        elif isinstance(node, ast.AugAssign):
            before = ast.Name(node.target.id, ast.Load())  # type: ignore[union-attr]
            pairs = [(node.target, ast.BinOp(before, node.op, node.value))]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        else:
            return []
        found = []
        for target, value in pairs:
            try:
                if isinstance(target, ast.Tuple):
                    found += self._returned(target, value)
                    continue
                fact = Fact() if value is None else self._value(node, value)
            except _UnreachedError:
                continue
            found += [(part.id, fact) for part in walk(target) if isinstance(part, ast.Name)]
        return found

    def _returned(self, target: ast.Tuple, value: ast.expr | None) -> list[tuple[str, Fact]]:
        """The names of the values that a device function returns."""
        names = [part.id if isinstance(part, ast.Name) else "" for part in target.elts]
        facts = self.rules.returned(value) if isinstance(value, ast.Call) else ()
        if len(facts) != len(names):
            return [(part.id, Fact()) for part in walk(target) if isinstance(part, ast.Name)]
        return [(name, bounded(fact)) for name, fact in zip(names, facts) if name]

    def _value(self, node: ast.stmt, value: ast.expr) -> Fact:
        return self.rules.counted(value) if isinstance(node, ast.For) else bounded(self.rules.of(value))


def in_order(block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements as they are written, inner ones after the one that they are part of."""
    for node in block:
        yield node
        yield from in_order([*getattr(node, "body", []), *getattr(node, "orelse", [])])


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        return list(zip(target.elts, value.elts))
    return [(target, value)]
