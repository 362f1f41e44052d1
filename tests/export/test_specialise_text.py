"""What specialisation leaves of comments, parameters, blank lines and names."""

from __future__ import annotations

import pytest

from export.exporting import as_text, specialised
from export.test_specialise import assert_becomes, cut
from postlude.export.syntax.joined import join
from postlude.export.syntax.source import parse, text_of


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("[COUT] where YES", "[COUT]"),
        ("the low plane, where PLANES is 2", "the low plane"),
        ("the low plane; where PLANES is set", "the low plane"),
        ("over the input; rows overlap where PLANES > 2", "over the input"),
        ("over the input; rows overlap where PLANES > 1", "over the input; rows overlap"),
        ("[N, C, S], or [N, S, C] where NO, out; where YES", "[N, C, S], out"),
        ("[N, C, S], or [N, S, C] where YES, out; where MODE", "[N, S, C], out"),
        ("[N, C] where YES, else [N], out", "[N, C], out"),
        ("[N, C] where NO, else [N], out", "[N], out"),
        ("[N], out, where MODE: a tile's outputs", "[N], out: a tile's outputs"),
        ("[N, C]; sums where not YES", "[N, C]"),
        ("[C], unread without YES", "[C]"),
        ("[PLANES·BM, ONE·BK], BM·ONE", "[2·BM, BK], BM"),
        ("where x is somewhere", "where x is somewhere"),
        ('[N, S], or where MODE is "raw" as p_x, or [N, C] where NO, out', "as p_x, out"),
        ('[N, S], or where MODE is "no" as p_x, or [N, C] where NO, out', "[N, S], out"),
        ("of it: its [N], or where YES in fp32 [M], or [K] where NO", "of it: in fp32 [M]"),
        ("of it: its [N], or where NO in fp32 [M], or [K] where NO", "of it: its [N]"),
        ("[N, C], out; may be p_x. [N] where YES", "[N], out"),
        ("[N, C], out; may be p_x. [N] where NO", "[N, C], out; may be p_x"),
        ("[ONE], or [ONE, 0]", "[1]"),
        ("[ONE], or [ONE, 10]", "[1], or [1, 10]"),
    ],
)
def test_comments_lose_what_is_decided(comment: str, expected: str) -> None:
    source = (
        f"def f(\n    p_x,  # {comment}\n    YES, NO, PLANES, MODE, ONE,\n):\n    g(p_x, YES, NO, PLANES, MODE, ONE)\n"
    )
    text = cut(source, YES=True, NO=False, PLANES=2, MODE="raw", ONE=1)
    assert text.splitlines()[1] == f"    p_x,  # {expected}"


def test_a_remark_goes_on_in_the_next_line() -> None:
    text = text_of(parse("def f(\n    a,  # the first,\n    # at length\n    b,  # the second\n):\n    g(a, b)\n"))
    assert "    a,  # the first, at length\n    b,  # the second\n" in text


def test_values_of_a_tuple_that_nobody_reads_have_no_name() -> None:
    source = "def f(x):\n    a, b = g(x)\n    h(b)\n    for i in range(x):\n        a, b = g(i)\n        h(b)\n"
    assert text_of(specialised(parse(source), {})).count("_, b = g(") == 2


def test_parameters_go_with_their_comments() -> None:
    before = """
    def f(
        p_x,  # read
        p_low,  # not read
        # on the next one
        STRIDE=4,
        SIZE: tl.constexpr = 3,  # decided
        p_y=None,
    ):
        return g(p_x, SIZE, p_y)
    """
    after = """
    def f(
        p_x,  # read
        p_y=None,
    ):
        return g(p_x, 3, p_y)
    """
    assert_becomes(before, after, SIZE=3)
    assert cut("def f(a, b, c=1, d=2):\n    return b\n") == "def f(b):\n    return b\n"


def test_strings_stay_as_they_are() -> None:
    before = 'def f(FLAG):\n    if FLAG:\n        g("""a\n        b\n\n\n        # c""")\n'
    assert cut(before, FLAG=True) == 'def f():\n    g("a\\n        b\\n\\n\\n        # c")\n'


def test_blank_lines() -> None:
    before = "def f(x, FLAG):\n\n    if FLAG:\n\n        g(1)\n\n    if not FLAG:\n        g(2)\n\n    return x\n"
    assert cut(before, FLAG=True) == "def f(x):\n    g(1)\n\n    return x\n"


def test_names() -> None:
    source = "def some_kernel(p_x, BEFORE):\n    return BEFORE(p_x, p_x=1)  # of p_x by BEFORE\n"
    made = as_text(specialised(parse(source), {}, {"some_kernel": "one", "p_x": "x_ptr", "BEFORE": "relu"}))
    assert made.text == "def one(x_ptr, relu):\n    return relu(x_ptr, p_x=1)  # of x_ptr by relu\n"
    assert made.parameters == ("x_ptr", "relu")


JOINED = """@triton.jit
def kernel(p_x, p_y, N):
    i = tl.program_id(0) % 8
    o = i * N + tl.arange(0, 4)
    m = o < N
    twice = o * 2  # [4]
    b = tl.load(p_x + twice, mask=m)
    N = N + 1
    late = o + N
    for k in range(2):
        once = k * 3
        b += once
        far = i + 5
        N = far
        b += far
    tl.store(p_y + late, b)
"""


def test_short_expressions_stand_where_they_are_read() -> None:
    """Not what has a remark, is read twice, or would be computed from other values or again in a loop."""
    function = parse(JOINED)
    join(function)
    text = text_of(function)
    assert "    twice = o * 2  # [4]\n" in text
    assert "tl.load(p_x + twice, mask=o < N)" in text
    assert "        b += k * 3\n" in text
    assert "        far = i + 5\n" in text  # read twice
    assert "    late = o + (N + 1)\n    for k" in text  # N is another one below
