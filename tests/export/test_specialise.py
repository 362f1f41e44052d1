"""Rules of specialisation on small functions, each with the whole text that is expected."""

from __future__ import annotations

import textwrap

import pytest

from export.exporting import as_text, specialised
from postlude.export.device.library import Kernel
from postlude.export.syntax.source import parse, text_of
from postlude.export.syntax.specialise import Inline
from postlude.plan.program import Word


def cut(source: str, **constants: object) -> str:
    return text_of(specialised(parse(textwrap.dedent(source).lstrip("\n")), constants))


def assert_becomes(before: str, after: str, **constants: object) -> None:
    assert cut(before, **constants) == textwrap.dedent(after).lstrip("\n")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("x + SIZE", "x + 64"),
        ("f(SIZE // BLOCK)", "f(4)"),
        ("SIZE * (BLOCK + 1) - 1", "1087"),
        ("x if FLAG else y", "x"),
        ("(y if not FLAG else x[0]) * SIZE", "x[0] * 64"),
        ("(y if FLAG and y > 0 else x) + SIZE", "(y if y > 0 else x) + 64"),
        ('x if MODE == "raw" else y', "x"),
        ('x if MODE in ("no", "done") else y', "y"),
        ("tl.expand_dims(x + y, ZERO) * tl.expand_dims(y, ONE)", "(x + y)[None, :] * y[:, None]"),
        ("x.to(DTYPE)", "x.to(tl.float32)"),
        ("x * NEGATIVE + f(NEGATIVE)", "x * -2 + f(-2)"),
        ("BEFORE(x[None, :], N, y)", "relu(x[None, :])"),
        ("f(tl.cdiv(100, 1) // BLOCK)", "f(6)"),
        ("NEGATIVE // BLOCK", "-2 // 16"),
    ],
)
def test_expressions(expression: str, expected: str) -> None:
    parameters = "x, y, N, M, SIZE, BLOCK, FLAG, MODE, ONE, ZERO, NEGATIVE, DTYPE, BEFORE"
    constants = {
        "SIZE": 64,
        "BLOCK": 16,
        "FLAG": True,
        "MODE": "raw",
        "ONE": 1,
        "ZERO": 0,
        "NEGATIVE": -2,
        "DTYPE": Word("tl.float32"),
        "BEFORE": Inline("relu({0})"),
    }
    text = cut(f"def f({parameters}):\n    return {expression}\n", **constants)
    assert text.splitlines()[1] == f"    return {expected}"


BRANCHES = """
    @triton.jit
    def f(p_y, x, FLAG: tl.constexpr):
        # about both
        if FLAG:  # gone with its line
            # about one
            tl.store(p_y, x)  # kept

            tl.store(p_y + 1, x)
            # the end of one
        else:
            # about the other
            tl.store(p_y, 0)
        # after
        tl.store(p_y + 2, x)
    """


def test_a_branch_that_is_taken_moves_out() -> None:
    expected = """
    @triton.jit
    def f(p_y, x):
        # about both
        # about one
        tl.store(p_y, x)  # kept

        tl.store(p_y + 1, x)
        # the end of one
        # after
        tl.store(p_y + 2, x)
    """
    assert_becomes(BRANCHES, expected, FLAG=True)


def test_else_moves_out() -> None:
    expected = """
    @triton.jit
    def f(p_y, x):
        # about both
        # about the other
        tl.store(p_y, 0)
        # after
        tl.store(p_y + 2, x)
    """
    assert_becomes(BRANCHES, expected, FLAG=False)


LADDER = """
    def f(x, MODE):
        if MODE == "a":
            g(1)
        elif x > 0:
            g(2)
        elif MODE == "b":
            g(3)
        else:
            g(4)
    """


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("a", "def f():\n    g(1)\n"),
        ("b", "def f(x):\n    if x > 0:\n        g(2)\n    else:\n        g(3)\n"),
        ("c", "def f(x):\n    if x > 0:\n        g(2)\n    else:\n        g(4)\n"),
    ],
)
def test_ladders(mode: str, expected: str) -> None:
    assert cut(LADDER, MODE=mode) == expected


def test_conditions_lose_what_is_known() -> None:
    before = """
    def f(x, PLANES, FLAG):
        if PLANES == 2 and x > 0 and FLAG:
            g(1)
        if x > 1 or not FLAG:
            g(2)
        if g(3) and not FLAG:
            g(4)
        if x > 2 and not FLAG:
            g(5)
    """
    after = """
    def f(x):
        if x > 0:
            g(1)
        if x > 1:
            g(2)
        if g(3) and False:
            g(4)
    """
    assert_becomes(before, after, PLANES=2, FLAG=True)  # an effect in front of what decides must stay


def test_what_stays_a_parameter_still_decides() -> None:
    source = "def f(x, WIDTH, BLOCK):\n    if WIDTH > 1:\n        g(x)\n    g(WIDTH * BLOCK)\n"
    made = as_text(specialised(parse(source), {"WIDTH": 1, "BLOCK": 16}, keep={"WIDTH"}))
    assert made == Kernel("f", "def f(WIDTH):\n    g(WIDTH * 16)\n", ("WIDTH",))


def test_local_constants() -> None:
    before = """
    def f(p_y, n, C: tl.constexpr, BLOCK: tl.constexpr):
        STEPS: tl.constexpr = C // BLOCK  # how many
        WHOLE: tl.constexpr = C % BLOCK == 0
        K: tl.constexpr = C * BLOCK
        i_b = n % 1
        o_p = tl.program_id(0) // STEPS
        o_s = o_p
        if WHOLE:
            tl.store(p_y + o_s + i_b, K)  # [STEPS·BLOCK]
    """
    after = """
    def f(p_y, n):
        i_b = n % 1
        o_p = tl.program_id(0) // 1
        tl.store(p_y + o_p + i_b, 4096)  # [64]
    """
    assert_becomes(before, after, C=64, BLOCK=64)


def test_a_loop_of_one_round_is_its_body() -> None:
    before = """
    def f(p_y, n, BLOCK: tl.constexpr):
        for start in range(0, 48, BLOCK):
            o = start + tl.arange(0, BLOCK)
            tl.store(p_y + o, n)
        for k in range(2):
            i = k
            tl.store(p_y + i, i)
    """
    after = """
    def f(p_y, n):
        o = 0 + tl.arange(0, 64)
        tl.store(p_y + o, n)
        for k in range(2):
            tl.store(p_y + k, k)
    """
    assert_becomes(before, after, BLOCK=64)
    assert "for start in" in cut(before, BLOCK=32)


def test_a_decided_parameter_that_is_overwritten() -> None:
    source = "def f(x, S, ALIGN):\n    S = S // ALIGN * ALIGN + x\n    return S\n"
    assert cut(source, S=40, ALIGN=8) == "def f(x):\n    S = 40 + x\n    return S\n"
    with pytest.raises(ValueError, match="S is decided, and assigned by"):
        cut("def f(S):\n    for i in range(3):\n        S = S + i\n    return S\n", S=4)


def test_assignments_that_nobody_reads() -> None:
    before = """
    def f(p_x, p_y, p_z, n, FLAG):
        # of no use without squares
        a = tl.load(p_x)
        b = a * 2
        mean = tl.zeros([], tl.float32)
        squares = mean * 1.5  # goes
        for i in range(n):
            squares += tl.load(p_x + i)
            mean = mean + tl.load(p_y + i)
        scale = 1.0
        scale = tl.load(p_y)
        old = tl.atomic_add(p_y, 1)
        found = unknown(p_z)
        if FLAG:
            tl.store(p_y, b)
            tl.store(p_y, squares)
        tl.store(p_y, mean * scale)
    """
    after = """
    def f(p_y, p_z, n):
        mean = tl.zeros([], tl.float32)
        for i in range(n):
            mean = mean + tl.load(p_y + i)
        scale = tl.load(p_y)
        old = tl.atomic_add(p_y, 1)
        found = unknown(p_z)
        tl.store(p_y, mean * scale)
    """
    assert_becomes(before, after, FLAG=False)


def test_blocks_that_do_nothing_any_more() -> None:
    before = """
    def f(p_x, p_y, n, x, FLAG):
        total = 0.0
        for i in range(n):
            if i > 3:
                total += tl.load(p_x + i)
        if x > 0:
            tl.store(p_y, x)
        else:
            y = x
        if FLAG:
            tl.store(p_y, total)
    """
    assert_becomes(before, "def f(p_y, x):\n    if x > 0:\n        tl.store(p_y, x)\n", FLAG=False)


def test_what_follows_a_return_goes() -> None:
    before = '''
    @triton.jit
    def group_mean(x, o_c, PER: tl.constexpr):
        """The mean over PER neighbours."""
        if PER == 1:
            return x
        o_g = o_c // PER
        # Chosen, not multiplied.
        return tl.sum(tl.where(o_g[:, None] == o_g[None, :], x[None, :], 0.0), axis=1) / PER
    '''
    after = '''
    @triton.jit
    def group_mean(x):
        """The mean over 1 neighbours."""
        return x
    '''
    assert_becomes(before, after, PER=1)
