"""The device functions that a kernel calls, each cut down to what all of the kernel's calls of it have in common."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from postlude.export.device_text import Kernel, cut, library
from postlude.export.layout import fold
from postlude.export.simplify import simplified_helper
from postlude.export.specialise import Name


def with_helpers(functions: Sequence[Kernel], values: Mapping[str, object]) -> list[Kernel]:
    """The functions with their helpers in front. `values`: the kernel's numbers that go by names."""
    texts = {function.name: function.text for function in functions}
    helpers: list[str] = []
    while (helper := _next_helper(texts)) is not None:
        parameters = [arg.arg for arg in _function(library()[helper]).args.args]
        calls = [call for text in texts.values() for call in _calls(text, helper)]
        shared = {word: value for place, word in enumerate(parameters)
                  if (value := _shared([call.args[place] for call in calls], values)) is not None}  # fmt: skip
        made = cut(simplified_helper(helper, library()[helper], shared), shared, {})
        left = [parameters.index(word) for word in made.parameters]
        for name, text in texts.items():
            texts[name] = _with_fewer(text, helper, left)
        texts[helper] = made.text
        helpers.insert(0, helper)
    order = [*helpers, *(function.name for function in functions)]
    return [_made(name, texts[name]) for name in order]


def _made(name: str, text: str) -> Kernel:
    return Kernel(name, fold(text), tuple(arg.arg for arg in _function(text).args.args))


def _function(text: str) -> ast.FunctionDef:
    found = ast.parse(text).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


def _next_helper(texts: Mapping[str, str]) -> str | None:
    """A device function that is called and not yet there, and that no other such one calls."""
    wanted = {name for text in texts.values() for name in _called(text)} - set(texts)
    for name in sorted(wanted):
        if not any(name in _reached(other) for other in wanted - {name}):
            return name
    return None


def _called(text: str) -> set[str]:
    return {name for name in re.findall(r"(?<![\w.])(\w+)\(", text) if name in library()}


def _reached(name: str) -> set[str]:
    """The functions that one calls, and those that they call."""
    found = _called(library()[name]) - {name}
    return found.union(*(_reached(other) for other in found))


def _calls(text: str, name: str) -> list[ast.Call]:
    nodes = [node for node in ast.walk(_function(text)) if isinstance(node, ast.Call)]
    return [node for node in nodes if isinstance(node.func, ast.Name) and node.func.id == name]


def _shared(arguments: Sequence[ast.expr], values: Mapping[str, object]) -> object | None:
    """The constant that an argument is in every call, if it is one."""
    if len({ast.unparse(argument) for argument in arguments}) != 1:
        return None
    argument = arguments[0]
    if isinstance(argument, ast.Name):
        return values.get(argument.id)
    if isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "tl":
        return Name(ast.unparse(argument))
    is_number = isinstance(argument, ast.Constant) and isinstance(argument.value, int | str)
    return argument.value if isinstance(argument, ast.Constant) and is_number else None


def _with_fewer(text: str, helper: str, left: Sequence[int]) -> str:
    """The text with its calls of a helper reduced to the arguments that it still takes."""
    count = len(_calls(text, helper))
    for number in range(count):
        call = sorted(_calls(text, helper), key=lambda node: (node.lineno, node.col_offset))[number]
        lines = text.split("\n")
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line) + 1)
        assert call.end_lineno is not None
        assert call.end_col_offset is not None
        start = starts[call.lineno - 1] + len(lines[call.lineno - 1].encode()[: call.col_offset].decode())
        end = starts[call.end_lineno - 1] + len(lines[call.end_lineno - 1].encode()[: call.end_col_offset].decode())
        given = [ast.get_source_segment(text, call.args[place]) or "" for place in left]
        text = f"{text[:start]}{helper}({', '.join(given)}){text[end:]}"
    return text
