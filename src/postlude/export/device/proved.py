"""Simplifies the functions of one launch as far as its grid, sizes and dtypes allow."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence

from postlude.export.device.library import library
from postlude.export.device.repeats import pure_helpers, remove_repeats
from postlude.export.syntax.analysis import calls_in
from postlude.export.syntax.facts import Fact, joined, literal
from postlude.export.syntax.flat import flatten
from postlude.export.syntax.joined import join
from postlude.export.syntax.known import Known
from postlude.export.syntax.narrowed import narrow
from postlude.export.syntax.proven import leave_out_proven, say_what_holds
from postlude.export.syntax.source import parameter_names
from postlude.export.syntax.specialise import simplify
from postlude.export.syntax.trees import copied, walk
from postlude.plan.program import Argument, Buffer, Descriptor, KernelCall

Given = Mapping[str, Fact]


class Launch:
    """What is known of one launch. `given` are the kernel's arguments, `steps` composed functions that it may call."""

    def __init__(self, call: KernelCall, given: Given, steps: Sequence[ast.FunctionDef] = ()) -> None:
        self.grid = call.grid
        self.given, self.threads = given, 32 * call.warps
        self.functions = {**library(), **{function.name: copied(function) for function in steps}}
        self.called = functools.cache(self._called)

    def known(self, function: ast.FunctionDef, given: Given | None = None) -> Known:
        return Known(function, self.given if given is None else given, self.grid, self.called)

    def include(self, function: ast.FunctionDef) -> None:
        """Takes a device function in place of the library's, because its calls pass only what it reads."""
        self.functions[function.name] = function
        self.called.cache_clear()

    def _called(self, name: str, arguments: tuple[Fact, ...]) -> tuple[Fact, ...]:
        """What a device function returns for these arguments."""
        if (function := self.functions.get(name)) is None:
            return ()
        known = self.known(function, dict(zip(parameter_names(function), arguments)))
        ends = [node.value for node in walk(function) if isinstance(node, ast.Return) and node.value is not None]
        values = [end.elts if isinstance(end, ast.Tuple) else [end] for end in ends]
        if not values or len(set(map(len, values))) > 1:
            return ()
        return tuple(functools.reduce(joined, map(known, parts)) for parts in zip(*values))

    def simplify(self, function: ast.FunctionDef, given: Given | None = None, joins: bool = True) -> None:
        """Leaves out what is proven to change nothing. `given` are the arguments of a device function; with `joins` the
        rest is written in as few statements as read well."""
        before = ""
        while before != (before := ast.dump(function)):
            narrow(function, lambda tree: self.known(tree, given))
            flatten(function, lambda tree: self.known(tree, given), self.functions.get)
            leave_out_proven(function, self.known(function, given), self.threads)
            simplify(function, helpers=pure_helpers())
            if joins:
                join(function, pure_helpers())
                remove_repeats(function)

    def say_what_holds(self, function: ast.FunctionDef) -> None:
        """Gives a reason for masks that stay although they always hold."""
        say_what_holds(function, self.known(function), self.threads)

    def arguments_of(
        self, name: str, words: Sequence[str], trees: Mapping[str, tuple[ast.FunctionDef, Given]]
    ) -> Given:
        """What the arguments of a device function are in all its calls in these functions."""
        found = dict[str, Fact]()
        for tree, given in trees.values():
            known = self.known(tree, given)
            for call in calls_in(tree, name):
                for word, argument in zip(words, call.args):
                    fact = known(argument)
                    found[word] = joined(found[word], fact) if word in found else fact
        return found


def given_facts(given: Mapping[str, Argument], constants: Mapping[str, object]) -> dict[str, Fact]:
    """The facts of a kernel's parameters."""
    found = {word: literal(value) for word, value in constants.items()}
    for word, value in given.items():
        if isinstance(value, Buffer):
            found[word] = Fact((), dtype=f"*{value.dtype}")
        elif isinstance(value, Descriptor):
            found[word] = Fact(tuple(value.block), dtype=f"*{value.buffer.dtype}")
        else:
            found[word] = literal(value)
    return found
