"""Shapes are cut from the declared inputs, cost little, and what the reference refuses is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from postlude.check.exam.shapes import (
    CHANNELS_LAST,
    DECLARED,
    FEWER,
    GAPS,
    LARGER,
    LONGER,
    MORE,
    NUMBERS,
    ODD,
    ONE,
    SMALLEST,
    WORKING,
    WORKING_FLOPS,
    cut,
    shapes_of,
)
from postlude.check.nested import tensors_in
from postlude.check.sides import UnanswerableError

GIVEN = [torch.rand(32, 4, 20, 24, 28)]


def free(inputs: list[Any]) -> tuple[float, int]:
    return 0.0, 1


def sizes(inputs: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_in(inputs)]


def test_every_kind_is_there_and_keeps_the_channels() -> None:
    found, left_out = shapes_of(GIVEN, free)
    assert left_out == []
    assert set(found) == {WORKING, DECLARED, ONE, ODD, SMALLEST, CHANNELS_LAST, GAPS, LARGER, LONGER, FEWER, MORE}
    assert found[DECLARED].inputs[0] is GIVEN[0]
    assert sizes(found[WORKING].inputs) == [(8, 4, 16, 16, 16)]
    assert sizes(found[ONE].inputs) == [(1, 4, 16, 16, 16)]
    odd = sizes(found[ODD].inputs)[0]
    assert len(set(odd[2:])) == 3
    assert all(size % 2 for size in odd[2:])
    assert sizes(found[SMALLEST].inputs) == [(2, 4, 2, 2, 2)]
    assert sizes(found[LARGER].inputs) == [(2 * len(GIVEN[0]) + 2, 4, 5, 5, 5)]
    assert sizes(found[LONGER].inputs) == [(3, 4, 5, 5, 30)]
    assert found[CHANNELS_LAST].inputs[0].is_contiguous(memory_format=torch.channels_last_3d)
    assert found[GAPS].inputs[0].stride(-1) == 2
    kept = [shape.inputs[0].shape[1] for name, shape in found.items() if name not in (FEWER, MORE)]
    assert set(kept) == {4}
    assert sizes(found[FEWER].inputs) == [(8, 3, 16, 16, 16)]
    assert sizes(found[MORE].inputs) == [(8, 6, 16, 16, 16)]
    assert torch.equal(found[GAPS].inputs[0], GIVEN[0][:3, :, :16, :16, :16])


def test_the_working_shape_follows_the_cost() -> None:
    def dear(inputs: list[Any]) -> tuple[float, int]:
        return WORKING_FLOPS * sizes(inputs)[0][0] / 4, 1

    assert sizes(shapes_of(GIVEN, dear)[0][WORKING].inputs) == [(4, 4, 16, 16, 16)]


def test_what_the_reference_refuses_is_left_out_and_said() -> None:
    def only_even(inputs: list[Any]) -> tuple[float, int]:
        if any(size % 2 for size in sizes(inputs)[0][2:]):
            raise UnanswerableError("the reference raised ValueError: odd")
        return 0.0, 1

    found, left_out = shapes_of(GIVEN, only_even)
    assert ODD not in found
    assert len(left_out) == 1
    assert left_out[0].startswith("odd sizes ((3, 4, 15, 13, 11)): the reference raised")


def test_a_reference_of_one_size_keeps_it() -> None:
    def fixed(inputs: list[Any]) -> tuple[float, int]:
        if sizes(inputs)[0][2:] != (20, 24, 28):
            raise UnanswerableError("another size")
        return 0.0, 1

    found, left_out = shapes_of(GIVEN, fixed)
    assert sizes(found[WORKING].inputs) == [(8, 4, 20, 24, 28)]
    assert SMALLEST not in found
    assert sizes(found[LARGER].inputs)[0][2:] == (20, 24, 28)
    assert [text.split(" (")[0] for text in left_out] == [ODD, LONGER]


def test_numbers_among_the_inputs_change() -> None:
    inputs = [torch.rand(3, 4), 2.0, {"share": 0.5, "name": "x"}, (1, None)]
    found, left_out = shapes_of(inputs, free)
    _, first, named, pair = found[NUMBERS].inputs
    assert (first, named, pair) == (1.5, {"share": 0.375, "name": "x"}, (1, None))
    assert left_out == ["other values of inputs that are not tensors ('x', 1)"]
    assert NUMBERS not in shapes_of(GIVEN, free)[0]


def test_labels_are_cut_and_grow_with_their_samples() -> None:
    found, _ = shapes_of([torch.rand(16, 5), torch.arange(16), torch.rand(16)], free)
    assert sizes(found[WORKING].inputs) == [(8, 5), (8,), (16,)]  # a vector of numbers may belong to channels
    assert sizes(found[LARGER].inputs) == [(34, 5), (34,), (16,)]


@pytest.mark.parametrize("batch", [1, 3, 99])
def test_cutting_takes_the_batch_of_every_tensor_that_has_it(batch: int) -> None:
    inputs = [torch.rand(6, 5), {"mask": torch.ones(6, 2, 7, dtype=torch.bool), "table": torch.rand(9, 4), "n": 3}]
    first, more = cut(inputs, batch=batch)
    kept = min(batch, 6)
    assert first.shape == (kept, 5)
    assert more["mask"].shape == (kept, 2, 7)
    assert more["table"].shape == (9, 4)
    assert more["n"] == 3


def test_another_size_along_axis_1_is_another_size_of_what_shares_it() -> None:
    found, _ = shapes_of([torch.rand(6, 9), torch.rand(9, 5), torch.arange(6)], free)
    assert sizes(found[MORE].inputs) == [(6, 11), (11, 5), (6,)]
    assert sizes(found[FEWER].inputs) == [(6, 7), (7, 5), (6,)]


def test_a_size_that_weights_fix_is_not_worth_a_note() -> None:
    def fixed(inputs: list[Any]) -> tuple[float, int]:
        if sizes(inputs)[0][1] != 9:
            raise UnanswerableError("shapes cannot be multiplied")
        return 1.0, 1

    found, left_out = shapes_of([torch.rand(6, 9)], fixed)
    assert not {FEWER, MORE} & set(found)
    assert left_out == []
