"""What a call determines of a kernel's text and of its steps, before the kernel is specialised."""

from __future__ import annotations

import pytest

from postlude.export.device import library
from postlude.export.device import prepared as module
from postlude.export.device.prepared import prepared
from postlude.export.device.steps_text import steps_text
from postlude.export.syntax.source import parse, text_of
from postlude.plan.program import Buffer, KernelCall

SOURCE = """\
@triton.jit
def some_kernel(p_x, p_y, UNITS, ALIGN: tl.constexpr):
    for unit in range(tl.program_id(0), UNITS, tl.num_programs(0)):
        # A unit has its own row.
        row = unit + tl.program_id(1)
        # What divides a row.
        row = row // ALIGN * ALIGN  # a hint
        b_x = tl.load(p_x + row).to(p_y.dtype.element_ty)
        tl.store(p_y + row, b_x.to(p_y.dtype.element_ty))
        tl.store(p_y + unit, (b_x + 1.0).to(p_y.dtype.element_ty))
"""


def text_for(grid: tuple[int, ...], units: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(library, "library", lambda: {"some_kernel": parse(SOURCE)})
    x, y = (Buffer(n, (8,), (1,), dtype, "given", n) for n, dtype in enumerate(("float32", "float16")))
    call = KernelCall("some", "some_kernel", grid, ("p_x", "p_y"), (x, y), (("UNITS", units),), (), 4)
    return text_of(prepared(call, dict(zip(call.parameters, call.arguments))))


def test_one_unit_for_each_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop, no axis of one program, no hint with what it says."""
    lines = [
        "# A unit has its own row.",
        "row = tl.program_id(0) + 0",
        "b_x = tl.load(p_x + row).to(tl.float16)",
        "tl.store(p_y + row, b_x.to(tl.float16))",
        "tl.store(p_y + tl.program_id(0), (b_x + 1.0).to(tl.float16))",
    ]
    head = SOURCE[: SOURCE.index("    for unit")]
    assert text_for((8,), 8, monkeypatch) == head + "".join(f"    {line}\n" for line in lines)


def test_several_units_for_each_program(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_for((4, 2), 8, monkeypatch)
    assert "for unit in range(tl.program_id(0), UNITS, tl.num_programs(0)):" in text
    assert "row = unit + tl.program_id(1)" in text


def test_a_kernel_without_the_loop_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNITS", "range(UNITS)")
    with pytest.raises(ValueError, match="some_kernel has 0 loops over units"):
        text_for((8,), 8, monkeypatch)


def steps(*lines: str) -> tuple[str, str]:
    """The function of these steps, or nothing, and its call."""
    text = "@triton.jit\ndef before(v0, o_c, a0):\n" + "".join(f"    {line}\n" for line in lines)
    function, call = steps_text(parse(text), {"a0": "p_bias"}, {1: "bias"}, 8)
    return "" if function is None else text_of(function), call.text


def test_steps_of_one_expression_stand_where_they_are_called() -> None:
    assert steps("return relu(v0)") == ("", "relu({0})")


def test_values_one_after_the_other_have_one_name() -> None:
    text, call = steps("t1 = tl.load(a0 + o_c).to(v0.dtype)", "v1 = add(v0, t1)", "return relu(v1)")
    assert call == "before_norm({0}, {1}, {2})"
    assert "    bias = tl.load(p_bias + o_c).to(v.dtype)\n" in text
    assert "v1" not in text


def test_a_value_that_is_read_again_keeps_its_name() -> None:
    """Mutant of the rule: with one name for all, the last line would add a value to itself."""
    text, _ = steps("v1 = relu(v0)", "v2 = sigmoid(v1)", "return add(v1, v2)")
    assert "v1 + " in text or "+ v1" in text
