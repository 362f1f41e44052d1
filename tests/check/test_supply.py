"""Every timed call has other values than all others; shapes, strides and the distribution stay."""

from __future__ import annotations

import pytest
import torch

from postlude.check.isolation.turns import ALIGNMENT, PLACES
from postlude.check.supply import Supply


@pytest.mark.parametrize("shape", [(12,), (3, 5), (2, 3, 10, 12), (4, 8, 16, 16)])
def test_no_two_calls_have_the_same_values(shape: tuple[int, ...]) -> None:
    supply = Supply([(torch.rand(shape),), (torch.rand(shape),)])
    seen = set()
    for _ in range(3):
        turns = supply.draw(200)
        given = [turns.inputs(call)[0] for call in range(len(turns))]
        assert {one.shape for one in given} == {torch.Size(shape)}
        assert len({one.data_ptr() for one in given}) == 200
        seen |= {tuple(one.flatten().tolist()) for one in given}
    assert len(seen) == 600


def test_most_of_the_elements_differ_between_calls() -> None:
    turns = Supply([(torch.arange(8192.0).reshape(2, 4, 32, 32),)]).draw(50)
    first = turns.inputs(0)[0]
    same = [float((first == turns.inputs(call)[0]).float().mean()) for call in range(1, 50)]
    assert max(same) < 0.5


def test_values_come_from_the_sets_and_places_are_aligned() -> None:
    x, y = torch.rand(100, 100), torch.rand(100, 100).t()
    supply = Supply([(x, {"y": y, "n": 3}), (x + 1, {"y": y + 1, "n": 3})])
    known = set(torch.cat([x, x + 1]).flatten().tolist())
    turns = supply.draw(7)
    for call in range(7):
        given, rest = turns.inputs(call)
        assert set(given.flatten().tolist()) <= known
        assert (rest["y"].stride(), rest["n"]) == (y.stride(), 3)
        assert (given.data_ptr() - turns.pools[0].data_ptr()) % ALIGNMENT == 0


def test_integers_stay_and_that_can_be_asked() -> None:
    indices = torch.arange(10)
    supply = Supply([(indices,), (indices,)])
    assert supply.repeats
    assert supply.draw(3).inputs(2)[0] is indices
    assert not Supply([(torch.rand(3), indices)]).repeats


def test_a_window_of_more_calls_than_places_begins_again() -> None:
    assert len(Supply([(torch.rand(3),)]).draw(PLACES + 5)) == PLACES + 5
    with pytest.raises(ValueError, match="nothing to draw"):
        Supply([])


def test_inputs_are_neither_copied_nor_sent_twice() -> None:
    """Some inputs have several GB: three sets of them, a pool and results must fit on a card."""
    x, indices = torch.rand(64, 128).t(), torch.arange(4)
    supply = Supply([(x, indices, "word")])
    assert supply._values[0][0].data_ptr() == x.data_ptr()
    turns = supply.draw(2)
    sent, forms = turns.whole()
    assert sent[0] is turns.pools[0]
    assert sent[1:] == (indices, "word")
    assert forms == [[[128, 64], [1, 128]], None]


def test_rotated_values_are_all_there() -> None:
    x = torch.arange(5000.0)
    pool = Supply([(x,)]).draw(1).pools[0]
    for start in range(0, len(pool) - 5000, 5000):
        part = pool[start : start + 5000]
        assert torch.equal(part.roll(-int(part.argmin())), x)
