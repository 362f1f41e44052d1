"""Each compile-time constant of the Triton kernels stands in the one table that says what its name means."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import postlude

FOLDER = Path(postlude.__file__).parent / "kernels" / "triton"
_ROW = re.compile(r"(?m)^    (\w+(?:, \w+)*)  +\S")


def signatures(text: str) -> Iterator[ast.arg]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            yield from (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)


def constants(text: str) -> set[str]:
    return {arg.arg for arg in signatures(text) if arg.annotation is not None and "constexpr" in ast.unparse(arg)}


def table() -> list[str]:
    doc = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text("utf-8")), clean=False) or ""
    return [name for row in _ROW.findall(doc) for name in row.split(", ")]


def unexplained(text: str) -> set[str]:
    return constants(text) - set(table())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_constant_is_in_the_table(path: Path) -> None:
    assert unexplained(path.read_text("utf-8")) == set(), "say in kernels/triton/__init__.py what it means"


def test_the_table_has_each_name_once_and_none_that_is_gone() -> None:
    used = {arg.arg for path in FOLDER.glob("*.py") for arg in signatures(path.read_text("utf-8"))}
    assert len(table()) == len(set(table()))
    assert set(table()) <= used


def test_a_boolean_says_what_is_so() -> None:
    """What a kernel only ever tests is named as a condition."""
    for path in FOLDER.glob("*.py"):
        for name in _tested(path.read_text("utf-8")) & constants(path.read_text("utf-8")):
            assert re.match(r"(?:IS|HAS|KEEPS|FLAGS|USES)_", name), f"{path.name}: {name}"


def _tested(text: str) -> set[str]:
    """Names that stand alone as a condition."""
    tests = [node.test for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If | ast.IfExp)]
    parts = [part for test in tests for part in (test.values if isinstance(test, ast.BoolOp) else [test])]
    bare = [part.operand if isinstance(part, ast.UnaryOp) else part for part in parts]
    return {part.id for part in bare if isinstance(part, ast.Name)}


def test_a_new_constant_is_seen() -> None:
    text = (FOLDER / "tiles.py").read_text("utf-8")
    assert unexplained(text.replace("HAS_NORM: tl.constexpr", "WITH_NORM: tl.constexpr")) == {"WITH_NORM"}
