"""The device functions that a kernel calls, each specialised to what the kernel's calls of it have in common."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence

from postlude.export.device.inlining import put_expression
from postlude.export.device.library import from_library, library
from postlude.export.device.proved import Launch
from postlude.export.device.single import make_single
from postlude.export.syntax.analysis import calls_in, name_of
from postlude.export.syntax.source import parameter_names
from postlude.export.syntax.specialise import drop_unread, specialise
from postlude.plan.program import Word


def with_helpers(
    functions: Sequence[ast.FunctionDef], values: Mapping[str, object], single: bool, launch: Launch
) -> list[ast.FunctionDef]:
    """The functions, of which the kernel is the last, with their helpers before them. `values` are the kernel's numbers
    that keep their names; with `single` nothing is float64."""
    *steps, kernel = functions
    trees, given = {kernel.name: kernel}, {kernel.name: launch.given}

    def include(function: ast.FunctionDef, constants: Mapping[str, object]) -> None:
        """Adds a function that none but those in `trees` calls."""
        name, words = function.name, parameter_names(function)
        calls = [call for tree in trees.values() for call in calls_in(tree, name)]
        given[name] = launch.arguments_of(name, words, {caller: (trees[caller], given[caller]) for caller in trees})
        specialise(function, constants)
        launch.simplify(function, given[name], joins=False)  # first, short helpers are put where they are called
        drop_unread(function)
        for call in calls:
            call.args = [call.args[words.index(word)] for word in parameter_names(function)]
        trees[name] = function
        launch.include(function)

    for function in steps:
        include(function, {})
    helpers: list[str] = []
    while (helper := _next_helper(trees)) is not None:
        calls = [call for tree in trees.values() for call in calls_in(tree, helper)]
        places = enumerate(parameter_names(library()[helper]))
        found = {word: _shared([call.args[place] for call in calls], values) for place, word in places}
        shared = {word: value for word, value in found.items() if value is not None}
        function = from_library(helper)
        if single:
            make_single(function)
        include(function, shared)
        helpers.insert(0, helper)
    names = [function.name for function in functions]
    for helper in list(helpers):
        if put_expression(trees, helper, names):
            helpers.remove(helper)
    for name in (*helpers, *names[:-1]):
        launch.simplify(trees[name], given[name])
    return [trees[name] for name in (*helpers, *names)]


def _next_helper(trees: Mapping[str, ast.FunctionDef]) -> str | None:
    """A device function that is called but not included yet, and that no other such function calls."""
    called = set[str]().union(*map(_called_by, trees.values()))
    wanted = called & library().keys() - trees.keys()
    return next((name for name in sorted(wanted) if not any(name in _reached(other) for other in wanted)), None)


@functools.cache
def _reached(name: str) -> set[str]:
    """The functions that a function calls, directly or indirectly."""
    found = _called_by(library()[name]) & library().keys() - {name}
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
