"""The device functions that a kernel calls, each specialised to what the kernel's calls of it have in common."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence

from postlude.export.device.inlining import put_expression
from postlude.export.device.library import Kernel, cut, kernel_of, library
from postlude.export.device.proved import Launch
from postlude.export.device.simplify import simplified_helper
from postlude.export.device.single import in_single
from postlude.export.syntax.analysis import calls_in, name_of
from postlude.export.syntax.source import parse
from postlude.plan.program import Word


def with_helpers(
    functions: Sequence[Kernel], values: Mapping[str, object], single: bool, launch: Launch
) -> list[Kernel]:
    """The functions, of which the kernel is the last, with their helpers before them. `values` are the kernel's numbers
    that keep their names; with `single` nothing is float64."""
    *steps, kernel = functions
    trees, given = {kernel.name: parse(kernel.text)}, {kernel.name: launch.given}

    def include(made: Kernel) -> None:
        """Adds a function that none but those in `trees` calls."""
        words = made.parameters
        calls = [call for tree in trees.values() for call in calls_in(tree, made.name)]
        given[made.name] = launch.arguments_of(made.name, words, {name: (trees[name], given[name]) for name in trees})
        made = launch.shorter(made, given[made.name])
        for call in calls:
            call.args = [call.args[words.index(word)] for word in made.parameters]
        trees[made.name] = parse(made.text)

    for function in steps:
        include(function)
    helpers: list[str] = []
    while (helper := _next_helper(trees)) is not None:
        parameters = [arg.arg for arg in parse(library()[helper]).args.args]
        calls = [call for tree in trees.values() for call in calls_in(tree, helper)]
        shared = {word: value for place, word in enumerate(parameters)
                  if (value := _shared([call.args[place] for call in calls], values)) is not None}  # fmt: skip
        source = simplified_helper(helper, library()[helper], shared)
        made = cut(in_single(source) if single else source, shared, {})
        for call in calls:
            call.args = [call.args[parameters.index(word)] for word in made.parameters]
        include(made)
        helpers.insert(0, helper)
    names = [function.name for function in functions]
    for helper in list(helpers):
        if put_expression(trees, helper, names):
            helpers.remove(helper)
    return [kernel_of(trees[name]) for name in (*helpers, *names)]


def _next_helper(trees: Mapping[str, ast.FunctionDef]) -> str | None:
    """A device function that is called but not included yet, and that no other such function calls."""
    called = set[str]().union(*map(_called_by, trees.values()))
    wanted = called & library().keys() - trees.keys()
    return next((name for name in sorted(wanted) if not any(name in _reached(other) for other in wanted)), None)


@functools.cache
def _reached(name: str) -> set[str]:
    """The functions that a function calls, directly or indirectly."""
    found = _called_by(parse(library()[name])) & library().keys() - {name}
    return found.union(*(_reached(other) for other in found))


def _called_by(function: ast.FunctionDef) -> set[str]:
    return {name_of(call.func) for call in calls_in(function)}


def _shared(arguments: Sequence[ast.expr], values: Mapping[str, object]) -> object | None:
    """The constant that an argument has in every call, if there is one."""
    if len({ast.unparse(argument) for argument in arguments}) != 1:
        return None
    argument = arguments[0]
    if isinstance(argument, ast.Name):
        return values.get(argument.id)
    if isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "tl":
        return Word(ast.unparse(argument))
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, int | str) else None
