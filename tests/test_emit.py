"""The emitted text of a pass: readable, loads each tensor once, one function."""

from __future__ import annotations

import ast

import pytest

from cases import BY_NAME, CASES, CHAIN_61, Builder, conv
from postlude.emit import emit
from postlude.plan.barriers import last_fused_step
from postlude.steps import forward, pass_slots, reads_rows, too_many_tensors


def test_chain_61_reads_as_one_would_write_it() -> None:
    assert emit(forward(CHAIN_61, "whole", 2)) == (
        "@triton.jit\n"
        "def whole(v0, mean, rstd, o_c, base, o_x, m_c, m_x, a0, a1, a2, a3, a4, a5):\n"
        "    v1 = relu(v0)\n"
        "    t2 = tl.load(a0 + o_c, mask=m_c, other=0.0).to(v0.dtype)\n"
        "    t3 = tl.load(a1 + o_c, mask=m_c, other=0.0).to(v0.dtype)\n"
        "    v2 = (v1 - mean) * (rstd * t2) + t3\n"
        "    return v2\n"
    )


def test_full_tensors_are_loaded_where_the_value_is() -> None:
    chain = BY_NAME["conv norm residual relu"].chain
    assert "+ base + o_x, mask=m_x" in emit(forward(chain, "whole", 3))


def test_every_case_emits_python() -> None:
    for case in CASES:
        last = last_fused_step(case.chain)
        ast.parse(emit(forward(case.chain, "whole", last), 6))


def test_a_row_is_found_by_the_sample() -> None:
    chain = BY_NAME["conv row norm row"].chain
    text = emit(forward(chain, "whole", 4), 4)
    assert "t3 = tl.load(a1 + base // a5 * 4 + o_c, mask=m_c, other=0.0).to(v0.dtype)" in text
    with pytest.raises(ValueError, match="without the number of channels"):
        emit(forward(chain, "whole", 4))


def test_the_size_of_a_sample_takes_the_place_of_a_tensor() -> None:
    built = Builder(2).op("mul", "row")
    for _ in range(4):
        built.op("add", "channel")
    assert too_many_tensors(built.chain(), 5) is None
    assert too_many_tensors(built.op("add", "channel").chain(), 6) == "the steps read more than 5 tensors"
    without = Builder(2)
    for _ in range(6):
        without.op("add", "channel")
    assert too_many_tensors(without.chain(), 6) is None


def test_a_pass_may_begin_with_the_norm() -> None:
    """On what the step before it gave: no bias, and no tensor that only earlier steps read."""
    chain = Builder(2, conv(2, (3, 4))).op("mul", "row").op("silu").norm(2).op("add", "channel").chain()
    assert pass_slots(chain, 4) == (2, 3, 4, 5, 6)
    assert pass_slots(chain, 4, 3) == (4, 5, 6)
    assert (reads_rows(chain, 4), reads_rows(chain, 4, 3)) == (True, False)
    assert emit(forward(chain, "whole", 4, first=3)) == (
        "@triton.jit\n"
        "def whole(v2, mean, rstd, o_c, base, o_x, m_c, m_x, a0, a1, a2, a3, a4, a5):\n"
        "    t4 = tl.load(a0 + o_c, mask=m_c, other=0.0).to(v2.dtype)\n"
        "    t5 = tl.load(a1 + o_c, mask=m_c, other=0.0).to(v2.dtype)\n"
        "    v3 = (v2 - mean) * (rstd * t4) + t5\n"
        "    t6 = tl.load(a2 + o_c, mask=m_c, other=0.0).to(v2.dtype)\n"
        "    v4 = add(v3, t6)\n"
        "    return v4\n"
    )


def test_numbers_of_a_channel_are_spread_over_the_block() -> None:
    """And nothing else: a tensor of the value's size, or of one number, has its shape already."""
    built = Builder(2, conv(2, (3, 4))).op("mul", "row").op("add", "channel").op("add", "full").op("mul", "one")
    text = emit(forward(built.chain(), "before", 4), 4, spread="[None, :]")
    loads = [line.strip() for line in text.splitlines() if "tl.load" in line]
    assert [line.split(" ")[0] for line in loads if "other=0.0)[None, :].to(v0.dtype)" in line] == ["t2", "t3", "t4"]
    assert sum("[None, :]" in line for line in loads) == 3 == len(loads) - 2


@pytest.mark.parametrize(
    ("divisor", "expected"),
    [
        (2.0, "mul(v0, 0.5)"),
        (-0.25, "mul(v0, -4.0)"),
        (1.0, "mul(v0, 1.0)"),
        (2.0**64, f"mul(v0, {2.0**-64!r})"),
        (2.0**65, f"div(v0, {2.0**65!r})"),
        (2.0**-65, f"div(v0, {2.0**-65!r})"),  # of 2⁻¹⁴⁰ the inverse is infinite in fp32
        (3.0, "div(v0, 3.0)"),
        (0.0, "div(v0, 0.0)"),
    ],
)
def test_a_division_by_a_power_of_two_is_a_multiplication(divisor: float, expected: str) -> None:
    chain = Builder(2).op("div", divisor).chain()
    assert f"v1 = {expected}" in emit(forward(chain, "whole", 1))


def test_division_by_a_tensor_and_of_a_number_stay_divisions() -> None:
    for chain in (Builder(2).op("div", "one").chain(), Builder(2).op("rdiv", 2.0).chain()):
        assert "mul(" not in emit(forward(chain, "whole", 1))
