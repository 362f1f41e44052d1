"""What one launch proves to change nothing is left out, and nothing else."""

from __future__ import annotations

import textwrap

import pytest

from postlude.export.device.proved import Launch
from postlude.export.syntax.facts import Fact
from postlude.export.syntax.flat import flatten
from postlude.export.syntax.known import Known
from postlude.export.syntax.narrowed import narrow
from postlude.export.syntax.proven import leave_out_proven, say_what_holds
from postlude.export.syntax.proven_numbers import MAGNITUDES
from postlude.export.syntax.source import parse, text_of
from postlude.plan.program import KernelCall

GRID = (12, 4)
GIVEN = {
    **dict.fromkeys(("p_x", "p_y"), Fact((), dtype="*float32")),
    "p_half": Fact((), dtype="*float16"),
    "p_i": Fact((), dtype="*int32"),
    "W": Fact((), 32, 32, "whole"),
    **dict.fromkeys(("N", "M"), Fact((), dtype="int32")),
}
HEAD = "def kernel(p_x, p_y, p_half, p_i, W, N, M, unknown):\n"


def known(function: object) -> Known:
    return Known(function, GIVEN, GRID, lambda name, given: given if name in MAGNITUDES else ())  # type: ignore[arg-type]


def proved(body: str, threads: int = 128) -> str:
    """The body of a kernel after one round."""
    function = parse(HEAD + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n")
    narrow(function, known)
    leave_out_proven(function, known(function), threads)
    return textwrap.dedent(text_of(function).split(":\n", 1)[1]).rstrip("\n")


def fact_of(body: str, name: str) -> Fact:
    function = parse(HEAD + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n")
    return known(function).name(name)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("v = tl.program_id(0) // 5 * 100 + tl.arange(0, 64)", Fact((64,), 0, 263, "int32")),
        ("v = 3 - tl.program_id(1) % 2", Fact((), 2, 3, "int32")),
        ("v = (tl.program_id(0) - 5) // 2", Fact((), dtype="int32")),  # rounds towards 0 on the device
        ("v = tl.program_id(0) * 2000000000", Fact((), dtype="int32")),  # overflows
        ("v = tl.program_id(0).to(tl.int64) * 2000000000", Fact((), 0, 22000000000, "int64")),
        ("v = tl.load(p_i + tl.arange(0, 8)) * 2", Fact((8,), dtype="int32")),
        ("v = tl.max_contiguous(tl.arange(0, 8) * 2, 2)", Fact((8,), 0, 14, "int32")),
        ("v = 0\nfor i in range(4):\n    v += i", Fact((), dtype="int32")),  # grows in the loop
        ("v = 1\nfor i in range(4):\n    v = i", Fact((), 0, 3, "int32")),
        ("for v in range(2, 11, 4):\n    f(v)", Fact((), 2, 10, "int32")),
        ("v = tl.zeros([W, 4], tl.float32)[None, :]", Fact()),
        ("v = tl.zeros([W], tl.float32)[None, :] + tl.zeros([4], tl.float16)[:, None]", Fact((4, 32), dtype="float32")),
        ("v = 1\nv = GLOBAL", Fact()),
        ("x = tl.load(p_x + tl.arange(0, 8))\nv = tl.full(x.shape, 1.0, x.dtype)", Fact((8,), dtype="float32")),
        ("v = -tl.abs(tl.load(p_x))", Fact((), dtype="float32")),
        ("v = tl.where(tl.arange(0, 4) < 2, W, 7)", Fact((4,), 7, 32, "whole")),
        ("d = tl.float16\nv = tl.zeros([W], d) + tl.load(p_half)", Fact((32,), dtype="float16")),
    ],
)
def test_facts(body: str, expected: Fact) -> None:
    assert fact_of(body, "v") == expected


CHANGED = [
    # Masks that hold in every lane of every program, whole or in part, and what stands in for their lanes.
    ("o = tl.arange(0, 32)\nx = tl.load(p_x + o, mask=o < W, other=0.0)", "x = tl.load(p_x + o)"),
    ("o = tl.program_id(0) * 8 + tl.arange(0, 8)\ntl.store(p_y + o, 0.0, mask=o < 96)", "tl.store(p_y + o, 0.0)"),
    ("o = tl.arange(0, 64)\nr = tl.program_id(0)\nx = tl.load(p_x + o, mask=(o < 64) & (r < 3), other=0.0)",
     "x = tl.load(p_x + o, mask=r < 3, other=0.0)"),
    ("o = tl.arange(0, 32)\nr = tl.program_id(0) < 3\nx = tl.load(p_x + o[None, :] * 2, mask=((o < W) & r)[None, :])",
     "x = tl.load(p_x + o[None, :] * 2, mask=r)"),
    ("o = tl.arange(0, 8)\nm = (o < 8) & (tl.program_id(0) < 3)\nx = tl.load(p_x + o[None, :], mask=m[None, :])",
     "m = tl.program_id(0) < 3\nx = tl.load(p_x + o[None, :], mask=m)"),
    ("o = tl.arange(0, 8)\nb = tl.load(p_x + o)\nx = tl.where(o < 8, b, 0.0)", "x = b"),
    # Counts of lanes.
    ("o = tl.program_id(0) * 8 + tl.arange(0, 8)\nn = tl.sum((o < 96).to(tl.float32))", "n = 8.0"),
    # Conversions to what a value is, and what a store converts by itself.
    ("x = tl.load(p_x + tl.arange(0, 8)).to(tl.float32)", "x = tl.load(p_x + tl.arange(0, 8))"),
    ("x = tl.load(p_x)\ntl.store(p_half, x.to(tl.float16))", "tl.store(p_half, x)"),
    # Whole numbers.
    ("x = tl.program_id(0) // 12", "x = 0"),
    ("x = tl.program_id(0) % 12", "x = tl.program_id(0)"),
    ("x = tl.minimum(40 - tl.program_id(0), 16)", "x = 16"),
    ("x = (tl.program_id(0) - tl.program_id(0) // 12).to(tl.int64) * 1000", "x = tl.program_id(0) * 1000"),
    ("x = tl.minimum(W, 40).to(tl.float32)", "x = 32.0"),
    ("o = tl.arange(0, 8)\nx = (o - 8) // 8 * 0 + tl.arange(0, 1) * 64 + o", "x = (o - 8) // 8 * 0 + o"),
    ("if tl.program_id(0) < 12:\n    f()", "if True:\n    f()"),
    ("x = (3 - tl.program_id(0) + 2 - 1) * 1", "x = 4 - tl.program_id(0)"),
    ("n = tl.program_id(0) // 12 + 1\nx = n * tl.program_id(0) + n", "x = tl.program_id(0) + 1"),
    ("x = tl.program_id(0) - 1 + 3", "x = tl.program_id(0) + 2"),
    # Whole numbers of which nothing but the dtype is known.
    ("x = N // 1 % M", "x = N % M"),
    ("x = 1 * (N + M * 1) * 2", "x = (N + M) * 2"),
    ("x = 0 * N + (M % 3) * 2 + N % 1", "x = (M % 3) * 2"),
    ("x = f(N - 0) + (N + 0)", "x = f(N) + N"),
    ("x = tl.load(p_x + N * 1 + 0)", "x = tl.load(p_x + N)"),
    ("x = tl.arange(0, 64) * 1 + 0", "x = tl.arange(0, 64)"),
    ("x = N // 3 // 64", "x = N // 192"),
    ("x = N % 64 % 16 + N % 16 // 64", "x = N % 16"),
    ("x = N // 48 * 3 + N // 16 % 3", "x = N // 16"),
    ("x = N // 3 * 3 + N % 3", "x = N"),
    ("n = N // 16 % 3\nx = N // 48 * 3 + n", "x = N // 16"),  # by what a name stands for
    ("x = (N // 16 < 4) & (tl.arange(0, 8) < 8)[0]", "x = (N < 64) & (tl.arange(0, 8) < 8)[0]"),
    ("o = tl.arange(0, 8)\nx = tl.reshape(o * 2, [8])", "x = o * 2"),
    # A maximum of zeros and what is not below 0.
    ("m = finite_magnitude(tl.load(p_x + tl.arange(0, 8)))\nx = tl.maximum(tl.zeros([8], tl.float32), m)", "x = m"),
    # A store whose mask never holds.
    ("tl.store(p_x + tl.arange(0, 1), 0.0, mask=tl.arange(0, 1) < 0)\nx = 1", "x = 1"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "end"), CHANGED)
def test_what_changes_nothing_is_left_out(body: str, end: str) -> None:
    for _ in range(2):
        body = proved(body)
    assert body.endswith(end)


UNCHANGED = [
    "o = tl.arange(0, 64)\nx = tl.load(p_x + o, mask=o < W, other=0.0)",
    "o = tl.program_id(0) * 8 + tl.arange(0, 8)\ntl.store(p_y + o, 0.0, mask=o < 95)",
    "o = tl.arange(0, 8)\nx = tl.load(p_x + o, mask=tl.load(p_i + o) < 8, other=0.0)",  # not known
    "o = tl.arange(0, 8)\nx = tl.load(p_x + o, mask=o - 1 >= 0, other=0.0)",
    # Without the part that holds, the sum would be of one lane, and the choice would be a scalar.
    "m = (tl.arange(0, 8) < 8) & (tl.program_id(0) < 3)\nx = tl.sum(m.to(tl.float32))",
    "b = tl.load(p_x)\nx = tl.where(tl.arange(0, 8) < 8, b, 0.0)",
    "o = tl.arange(0, 8)\nm = (o < 8) & (tl.program_id(0) < 3)\nx = tl.load(p_x + o[None, :], mask=m[None, :])\nf(m)",
    "x = tl.load(p_half).to(tl.float32)",
    "x = tl.load(p_i).to(tl.float32, bitcast=True)",
    "x = tl.load(p_i)\ntl.store(p_half, x.to(tl.float32))",
    "x = tl.load(p_x)\ntl.store(p_x, x.to(tl.float16))",  # which rounds
    "x = tl.program_id(0) % 11",
    "x = tl.arange(0, 8) // 8",  # a block, not one 0
    "x = tl.minimum(20 - tl.program_id(0), 16)",
    "o = tl.arange(0, 8)\nx = o * 0 + tl.load(p_x)",
    "x = 64 + tl.arange(0, 1)",
    "sums = ()\nsums += (tl.load(p_x),)",
    "n = tl.zeros([4], tl.int32)\nx = tl.arange(0, 4)[:, None] + n[None, :]",
    "x = W * tl.program_id(0)",  # a name for the reader
    "x = unknown % 1 + unknown * 0 + (unknown + 0)",  # which may be a block, or not a whole number
    "x = (tl.arange(0, 64) % 1)[:, None]",
    "x = N % 16 % 64 + N // 7 * 3 + N // 2 % 3",
    "o = tl.arange(0, 8)\ntl.store(p_x + o, 0.0, mask=o < 1)",
    "x = tl.reshape(tl.arange(0, 8), [4, 2])",
    "x = tl.load(p_x) + 0",  # of -0.0 makes 0.0
    "x = 0 + tl.load(p_x)",
    "m = tl.load(p_x + tl.arange(0, 8))\nx = tl.maximum(tl.zeros([8], tl.float32), m)",  # which may be below 0
    "x = tl.load(p_i) - 1 + 3",  # which may overflow
    "x = tl.load(p_x) - 1 + 3",  # which rounds
    "for i in range(tl.cdiv(97, W)):\n    f(i)",
    # Offsets that do not fit in 32 bits, at once or in what is computed from them, here or in another function.
    "x = tl.load(p_x + tl.program_id(0).to(tl.int64) * 200000000)",
    "o = tl.program_id(0).to(tl.int64) * 100000000\nx = tl.load(p_x + (o + o))",
    "o = tl.load(p_i).to(tl.int64)\nx = tl.load(p_x + o * 2)",
    "o = tl.program_id(0).to(tl.int64)\nx = f(o)",
    "o = tl.program_id(0).to(tl.int64)\nx = tl.cumsum(o)",
    "for i in range(tl.program_id(0).to(tl.int64)):\n    f(i * 2000000000)",
]


@pytest.mark.parametrize("body", UNCHANGED)
def test_what_may_matter_stays(body: str) -> None:
    assert proved(body) == body


TILE = """
    o = tl.arange(0, 32)
    m = (o < 32)[:, None]
    x = tl.load(p_x + o[:, None] + o[None, :] * 32, mask=m)
    tl.store(p_y + o[:, None] * 32 + o[None, :], x, mask=m)
"""


def said(body: str, threads: int) -> str:
    function = parse(HEAD + textwrap.indent(body, "    ") + "\n")
    say_what_holds(function, known(function), threads)
    return text_of(function)


def test_masks_of_large_tiles_stay_and_say_why() -> None:
    held = proved(TILE, threads=32)
    assert held.count("mask=m") == 2
    text = said(held, threads=32)
    assert text.index("# The masks of this tile always hold.") < text.index("tl.load")
    assert text.count("always hold") == 1
    assert "mask" not in proved(TILE, threads=64)
    assert "mask" not in proved(TILE.partition("    tl.store")[0], threads=32)
    assert "always hold" not in said(held.replace("o < 32", "o < 31"), threads=32)


COLUMN = """\
def kernel(p_x, p_y):
    o_c = tl.program_id(0) + tl.arange(0, 1)
    most = tl.zeros([64, 1], tl.float32)
    for i in range(4):
        o_s = i * 64 + tl.arange(0, 64)
        most = tl.maximum(most, tl.abs(tl.load(p_x + (o_s[:, None] + o_c[None, :] * 256))))
    tl.atomic_max(p_y + o_c, tl.max(most, axis=0))
"""


def flat(text: str, **helpers: str) -> str:
    function = parse(text)
    flatten(function, known, lambda name: parse(helpers[name]) if name in helpers else None)
    return text_of(function)


def test_blocks_of_one_column_have_one_axis() -> None:
    found = flat(COLUMN)
    assert "o_c = tl.program_id(0) + 0\n" in found
    assert "most = tl.zeros([64], tl.float32)\n" in found
    assert "tl.load(p_x + (o_s + o_c * 256))" in found
    assert "[:, None]" not in found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tl.arange(0, 1)", "tl.arange(0, 2)"),  # two columns
        ("tl.max(most", "tl.sum(most"),  # whose order of summation may differ
        ("tl.max(most, axis=0)", "tl.max(most, axis=1)"),  # of rows
        ("tl.abs(tl.load", "f(tl.load"),  # an unknown function
        ("o_s[:, None]", "o_s[None, :]"),
    ],
)
def test_other_blocks_keep_their_axes(before: str, after: str) -> None:
    text = COLUMN.replace(before, after)
    assert flat(text) == text
    by_axis = "def f(x):\n    return tl.max(x, axis=0)[None, :]\n"
    assert flat(text, f=by_axis) == text


def test_a_device_function_is_known_by_what_its_calls_pass() -> None:
    """Mutant: by the library's parameters, the one argument that is left would be taken for the first."""
    call = KernelCall("some", "kernel", (4,), (), (), (), (), 4)
    whole = parse("def f(x, o):\n    return o % 2\n")
    kernel = parse("def kernel(p_x, p_y):\n    v = f(tl.arange(0, 8))\n")
    launch = Launch(call, {}, [whole])
    assert launch.known(kernel).name("v") == Fact()
    launch.include(parse("def f(o):\n    return o % 2\n"))
    assert launch.known(kernel).name("v") == Fact((8,), 0, 1, "int32")
