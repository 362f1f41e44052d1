"""The emitted text of a pass: readable, loads each tensor once, one function."""

from __future__ import annotations

import ast

import pytest

from cases import BY_NAME, CASES, CHAIN_61, Builder
from postlude.emit import emit, pass_slots, too_many_tensors
from postlude.plan.gpu import last_fused_step


def test_chain_61_reads_as_one_would_write_it() -> None:
    pointers = pass_slots(CHAIN_61, 2)
    assert emit(CHAIN_61, "whole", 2, pointers) == (
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
    assert "+ base + o_x, mask=m_x" in emit(chain, "whole", 3, pass_slots(chain, 3))


def test_every_case_emits_python() -> None:
    for case in CASES:
        last = last_fused_step(case.chain)
        ast.parse(emit(case.chain, "whole", last, pass_slots(case.chain, last), 6))


def test_a_row_is_found_by_the_sample() -> None:
    chain = BY_NAME["conv row norm row"].chain
    text = emit(chain, "whole", 4, pass_slots(chain, 4), 4)
    assert "t3 = tl.load(a1 + base // a5 * 4 + o_c, mask=m_c, other=0.0).to(v0.dtype)" in text
    with pytest.raises(ValueError, match="without the number of channels"):
        emit(chain, "whole", 4, pass_slots(chain, 4))


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
