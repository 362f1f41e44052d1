"""The library's device functions as syntax trees, and one of them as the text of a file."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

from postlude.export.syntax.in_place import without_shared
from postlude.export.syntax.layout import fold
from postlude.export.syntax.source import parameter_names, parse, text_of
from postlude.export.syntax.trees import copied


@dataclass(frozen=True)
class Kernel:
    """A function of the exported file, its text laid out."""

    name: str
    text: str
    parameters: tuple[str, ...]
    remarks: tuple[tuple[str, str], ...] = field(default=(), compare=False)  # of parameters, with one launch's sizes


@functools.cache
def library() -> Mapping[str, ast.FunctionDef]:
    """Every function in kernels/triton by name, except those that are inlined. Whoever changes one copies it first."""
    found = {}
    files = [file for file in resources.files("postlude.kernels.triton").iterdir() if file.name.endswith(".py")]
    for file in sorted(files, key=lambda file: file.name):
        text = re.sub(r"(?m)  # (?:noqa: |fmt: skip).*$", "", file.read_text("utf-8"))
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = "\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno]) + "\n"
    return without_shared({name: parse(text) for name, text in found.items()})


def from_library(name: str) -> ast.FunctionDef:
    """A function of the library, to be changed."""
    return copied(library()[name])


def kernel_of(function: ast.FunctionDef) -> Kernel:
    return Kernel(function.name, fold(text_of(function)), tuple(parameter_names(function)))
