"""Shared bodies put in place of their calls: names, parentheses, decided conditions, and clashes that are seen."""

from __future__ import annotations

import pytest

from postlude.export.syntax import in_place
from postlude.export.syntax.in_place import without_shared
from postlude.export.syntax.source import parse, text_of


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "SHARED", frozenset({"loaded", "scaled", "beside"}))


LOADED = '''@triton.jit
def loaded(p, o, m):
    """Two blocks."""
    # The first of them.
    first = tl.load(p + o * 2, mask=m)
    other = tl.load(p + 1, mask=m)  # [BLOCK]
    return first, other
'''
SCALED = """@triton.jit
def scaled(x, factor):
    return x * factor
"""
BESIDE = """@triton.jit
def beside(x, BLOCK_C: tl.constexpr):
    return x if BLOCK_C == 0 else x[None, :]
"""


def made(body: str, *shared: str) -> str:
    kernel = f"@triton.jit\ndef kernel(p_x, p_y, o_x, N):\n{body}"
    functions = {text.split("def ")[1].split("(")[0]: text for text in (kernel, *shared)}
    found = without_shared({name: parse(text) for name, text in functions.items()})
    assert list(found) == ["kernel"]
    return text_of(found["kernel"]).split("\n", 2)[2]


def test_results_take_the_callers_names_and_arguments_their_places() -> None:
    text = made("    for i in range(N):\n        b_x, _ = loaded(p_x + N, o_x + i, i < N)\n", LOADED)
    assert text == (
        "    for i in range(N):\n"
        "        # The first of them.\n"
        "        b_x = tl.load(p_x + N + (o_x + i) * 2, mask=i < N)\n"
        "        other = tl.load(p_x + N + 1, mask=i < N)  # [BLOCK]\n"
    )


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("scaled(o_x + 1, N)", "(o_x + 1) * N"),
        ("scaled(o_x, N - 1) + 1", "o_x * (N - 1) + 1"),
        ("N // scaled(o_x, 2)", "N // (o_x * 2)"),
        ("scaled(o_x, N)[:, None]", "(o_x * N)[:, None]"),
        ("f(scaled(scaled(o_x, 2), N))", "f(o_x * 2 * N)"),
        ("beside(o_x, N) * 2", "(o_x if N == 0 else o_x[None, :]) * 2"),
    ],
)
def test_expressions_mean_what_they_meant(call: str, wanted: str) -> None:
    assert made(f"    y = {call}\n", SCALED, BESIDE) == f"    y = {wanted}\n"


def test_a_name_that_the_caller_still_reads_is_no_place_to_write_to() -> None:
    with pytest.raises(ValueError, match="loaded assigns other, which its caller reads"):
        made("    other = N + 1\n    a, _ = loaded(p_x, o_x, True)\n    tl.store(p_y, other)\n", LOADED)
    with pytest.raises(ValueError, match="loaded assigns first, which its caller reads"):
        made("    first = N + 1\n    _, a = loaded(p_x, o_x, first > 0)\n    tl.store(p_y, a)\n", LOADED)
    made("    other = N + 1\n    a, _ = loaded(p_x, o_x, other > 0)\n    tl.store(p_y, a)\n", LOADED)


def test_a_body_that_is_no_statement_is_refused() -> None:
    with pytest.raises(ValueError, match="not called as a statement"):
        made("    tl.store(p_y, loaded(p_x, o_x, True)[0])\n", LOADED)
    with pytest.raises(ValueError, match="gives 2 values for 1 names"):
        made("    a = loaded(p_x, o_x, True)\n", LOADED)


def test_parameters_that_share_a_line_get_lines_of_their_own() -> None:
    head = "@triton.jit\ndef kernel(\n    p_x,  # [N]\n"
    text = f"{head}    A: tl.constexpr, B: tl.constexpr,  # two\n):\n    pass\n"
    wanted = f"{head}    A: tl.constexpr,  # two\n    B: tl.constexpr,\n):\n    pass\n"
    assert text_of(without_shared({"kernel": parse(text)})["kernel"]) == wanted
