"""The library's device functions as text, and their specialisation to one case."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

from postlude.export.syntax.in_place import whole_texts
from postlude.export.syntax.layout import fold
from postlude.export.syntax.source import text_of
from postlude.export.syntax.specialise import specialise


@dataclass(frozen=True)
class Kernel:
    """A function of the exported file, its text laid out."""

    name: str
    text: str
    parameters: tuple[str, ...]
    remarks: tuple[tuple[str, str], ...] = field(default=(), compare=False)  # of parameters, with one launch's sizes


@functools.cache
def library() -> dict[str, str]:
    """The text of every function in kernels/triton by name, except those that are inlined."""
    found = {}
    files = [file for file in resources.files("postlude.kernels.triton").iterdir() if file.name.endswith(".py")]
    for file in sorted(files, key=lambda file: file.name):
        text = re.sub(r"(?m)  # (?:noqa: |fmt: skip).*$", "", file.read_text("utf-8"))
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = "\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno]) + "\n"
    return whole_texts(found)


def changed(source: str, changes: Mapping[str, str]) -> str:
    """A kernel's text with pieces replaced; each piece must occur exactly once."""
    for before, after in changes.items():
        if source.count(before) != 1:
            raise ValueError(f"the kernel says {before!r} {source.count(before)} times, not once")
        source = source.replace(before, after)
    return source


def cut(source: str, constants: Mapping[str, object], names: Mapping[str, str], keep: tuple[str, ...] = ()) -> Kernel:
    """A function's text for these constants; constants that do not occur in it are ignored."""
    words = set(re.findall(r"\w+", source))
    # With their types: as a key True equals 1, but the text differs.
    known = tuple((name, type(value), value) for name, value in constants.items() if name in words)
    kept = frozenset(name for name, _, _ in known if name in keep)
    return _cut(source, known, tuple(names.items()), kept)


@functools.lru_cache(maxsize=256)
def _cut(
    source: str,
    constants: tuple[tuple[str, type, object], ...],
    names: tuple[tuple[str, str], ...],
    keep: frozenset[str],
) -> Kernel:
    return kernel_of(specialise(source, {name: value for name, _, value in constants}, dict(names), keep))


def kernel_of(function: ast.FunctionDef) -> Kernel:
    return Kernel(function.name, fold(text_of(function)), tuple(arg.arg for arg in function.args.args))


def shorter(kernel: Kernel) -> Kernel:
    """The function with what it says simplified. It keeps its parameters, because its callers pass them all."""
    made = cut(kernel.text, {}, {})
    return made if made.parameters == kernel.parameters else kernel
