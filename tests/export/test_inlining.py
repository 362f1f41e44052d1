"""Fewer lines: device functions where they are called, nothing computed twice, nothing for float64's sake."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from export.exporting import SMALL_PROBLEMS, Problem, export_text
from postlude.export.device import repeats
from postlude.export.device.inlining import put_in_place
from postlude.export.device.kernels import written_places
from postlude.export.device.library import Kernel, kernel_of
from postlude.export.device.repeats import remove_repeats
from postlude.export.device.single import make_single
from postlude.export.syntax.source import parse, text_of
from postlude.export.syntax.specialise import simplify


def texts(*sources: str) -> list[str]:
    return list(put_in_place([kernel_of(parse(source)) for source in sources]).values())


INVERSE = 'def inverse(x):\n    """1 / x, infinity included."""\n    root = tl.rsqrt(x)\n    return root * root\n'
SILU = "def silu(x):\n    return x * inverse(1.0 + tl.exp2(-x))\n"


def test_a_function_with_one_call_stands_there() -> None:
    """With what it says; an argument that this is about gets a name, and no name means two things."""
    kernel = "def some_kernel(p_y, x, root):\n    tl.store(p_y, silu(x) + root)\n"
    silu, _ = texts(INVERSE, SILU, kernel)
    lines = ["y = 1.0 + tl.exp2(-x)", "# 1 / y, infinity included.", "root = tl.rsqrt(y)", "return x * (root * root)"]
    assert silu == "def silu(x):\n" + "".join(f"    {line}\n" for line in lines)


def test_a_word_keeps_its_name_in_a_kernel_and_a_function_with_two_calls_stays() -> None:
    kernel = "def some_kernel(p_y, x):\n    tl.store(p_y, inverse(x) + silu(x))\n"
    assert texts(INVERSE, SILU, kernel) == [INVERSE, SILU, kernel]


def test_a_function_whose_call_is_an_argument_of_another_stays() -> None:
    """Put where the outer call is, the inner one would be left behind, and nobody would define it."""
    twice = "def twice(x):\n    return tl.where(x > 0, x, x * 2.0)\n"
    kernel = "def some_kernel(p_y, x):\n    tl.store(p_y, twice(twice(x)))\n"
    assert texts(twice, kernel) == [twice, kernel]


def test_a_short_expression_stands_at_every_call_and_unread_parameters_go() -> None:
    block = "def block(d_w, c0, k0, N):\n    return d_w.load([c0, k0])\n"
    body = "    a = block(d_w, i, 0, N)\n    tl.store(p_y, a + block(d_w, 0, i, N))\n"
    kernel = f"def some_kernel(p_y, d_w, i, N=3):\n{body}"
    (made,) = texts(block, kernel)
    expected = "    a = d_w.load([i, 0])\n    tl.store(p_y, a + d_w.load([0, i]))\n"
    assert made == f"def some_kernel(p_y, d_w, i):\n{expected}"


@pytest.mark.parametrize(
    ("between", "is_left"), [("tl.store(p_y, x)", False), ("tl.store(p_x, x)", True), ("o = 2", True)]
)
def test_what_a_name_holds_already_is_not_computed_again(between: str, is_left: bool) -> None:
    line = "    x = scale_for(tl.load(p_x + o))\n"
    function = parse(f"def f(p_x, p_y, o):\n{line}    {between}\n{line}")
    remove_repeats(function)
    assert text_of(function).count("scale_for") == 1 + is_left


def test_without_float64_a_constant_is_a_number() -> None:
    source = "def f(x):\n    if x.dtype == tl.float64:\n        return x\n"
    source += "    return tl.maximum(x, tl.full(x.shape, 2.0, x.dtype))\n"
    function = parse(source)
    make_single(function)
    assert text_of(function).splitlines()[-1] == "    return tl.maximum(x, 2.0)"
    assert "if False" in text_of(function)


def test_a_function_stores_by_its_own_calls_or_by_those_of_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a comment, a docstring or a name says is no call."""
    functions = {
        "plain": 'def plain(x):\n    """tl.store(p_x, x)"""\n    return x  # tl.store(p_x, x)\n',
        "named": "def named(store, x):\n    return plain(store + x)\n",
        "adds": "def adds(p_x, x):\n    tl.atomic_add(p_x, x)\n",
        "writes": "def writes(d_x, x):\n    d_x.store([0], x)\n",
        "calls": "def calls(d_x, x):\n    return plain(writes(d_x, x))\n",
    }
    monkeypatch.setattr(repeats, "library", lambda: {name: parse(text) for name, text in functions.items()})
    monkeypatch.setattr(repeats, "writes", functools.cache(repeats.writes.__wrapped__))
    assert {name for name in functions if repeats.writes(name)} == {"adds", "writes", "calls"}


def test_what_nobody_reads_is_not_computed_unless_it_stores() -> None:
    lines = ["scale = scale_for(tl.load(p_x))", "x = flag_infinity(p_y, tl.load(p_x))", "tl.store(p_y, tl.load(p_x))"]
    text = "def some_kernel(p_x, p_y):\n" + "".join(f"    {line}\n" for line in lines)
    function = parse(text)
    simplify(function, helpers=repeats.pure_helpers())
    assert text_of(function) == text.replace(f"    {lines[0]}\n", "")


def test_what_a_device_function_stores_to_is_written() -> None:
    lines = ["store_as(p_x + 1, tl.load(p_w), True)", "tl.store(p_y, flag_infinity(p_z, tl.load(p_w)))"]
    text = "def some_kernel(p_w, p_x, p_y, p_z):\n" + "".join(f"    {line}\n" for line in lines)
    assert written_places(Kernel("some_kernel", text, ("p_w", "p_x", "p_y", "p_z"))) == {1, 2, 3}


@pytest.mark.parametrize("problem", SMALL_PROBLEMS[::8], ids=lambda problem: problem.name)
def test_every_function_is_called_with_what_it_takes(problem: Problem, tmp_path: Path) -> None:
    made, _, _ = export_text(problem.text, tmp_path, dtype=problem.dtype, precision=problem.precision)
    functions = [node for node in ast.parse(made.text).body if isinstance(node, ast.FunctionDef)]
    device = {f.name: f for f in functions if f.decorator_list and "jit" in ast.unparse(f.decorator_list[0])}
    called = [node for f in functions for node in ast.walk(f) if isinstance(node, ast.Call)]
    for call in called:
        name = re.sub(r"\[.*", "", ast.unparse(call.func), flags=re.DOTALL)
        if name in device:
            takes = device[name].args
            assert len(takes.args) - len(takes.defaults) <= len(call.args) <= len(takes.args), name
