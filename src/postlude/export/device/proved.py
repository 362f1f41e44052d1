"""Kernels without what one launch's grid, sizes and dtypes prove to change nothing, and their device functions too."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence

from postlude.export.device.library import Kernel, cut, kernel_of, library
from postlude.export.syntax.analysis import calls_in
from postlude.export.syntax.facts import Fact, joined, literal
from postlude.export.syntax.flat import flatten
from postlude.export.syntax.known import Known
from postlude.export.syntax.narrowed import narrow
from postlude.export.syntax.proven import leave_out_proven, say_what_holds
from postlude.export.syntax.reused import reuse_names
from postlude.export.syntax.source import parse
from postlude.export.syntax.trees import walk
from postlude.plan.program import Argument, Buffer, Descriptor, KernelCall

Given = Mapping[str, Fact]


class Launch:
    """What is known of one launch. `given` are the kernel's arguments, `functions` composed steps that it may call."""

    def __init__(self, call: KernelCall, given: Given, functions: Sequence[Kernel] = ()) -> None:
        self.grid = call.grid
        self.given, self.threads = given, 32 * call.warps
        self.functions = {function.name: function.text for function in functions}
        self.called = functools.cache(self._called)

    def known(self, function: ast.FunctionDef, given: Given | None = None, first: bool = False) -> Known:
        return Known(function, self.given if given is None else given, self.grid, self.called, first)

    def _function(self, name: str) -> ast.FunctionDef | None:
        text = self.functions.get(name) or library().get(name)
        return None if text is None else parse(text)

    def _called(self, name: str, arguments: tuple[Fact, ...]) -> tuple[Fact, ...]:
        """What a device function returns for these arguments."""
        if (function := self._function(name)) is None:
            return ()
        words = [arg.arg for arg in function.args.args]
        known = self.known(function, dict(zip(words, arguments)))
        ends = [node.value for node in walk(function) if isinstance(node, ast.Return) and node.value is not None]
        values = [end.elts if isinstance(end, ast.Tuple) else [end] for end in ends]
        if not values or len(set(map(len, values))) > 1:
            return ()
        return tuple(functools.reduce(joined, map(known, parts)) for parts in zip(*values))

    def shorter(self, kernel: Kernel, given: Given | None = None) -> Kernel:
        """The kernel without what is proven to change nothing; it keeps its parameters."""
        text = ""
        while text != kernel.text:
            text, function = kernel.text, parse(kernel.text)
            narrow(function, lambda tree: self.known(tree, given))
            flatten(function, lambda tree: self.known(tree, given), self._function)
            known, first = self.known(function, given), self.known(function, given, first=True)
            leave_out_proven(function, known, first, self.threads)
            reuse_names(function)
            kernel = cut(kernel_of(function).text, {}, {})
        return kernel

    def said(self, kernel: Kernel) -> Kernel:
        """The kernel with a reason for masks that stay although they always hold."""
        function = parse(kernel.text)
        say_what_holds(function, self.known(function), self.threads)
        return kernel_of(function)

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
