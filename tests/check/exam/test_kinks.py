"""Modules at kinks: cotangents that spare them, and the truth on either side where none do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from postlude.check.compare import cotangent
from postlude.check.exam.truths import Truths
from postlude.check.sides import Question

SHAPE = (2, 4, 5, 6)
PLACE = (1, 2, 3, 4)
GRADIENT = "gradient of input[0]"


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), nn.GroupNorm(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean((2, 3))  # type: ignore[no-any-return]


def asked(module: nn.Module, value: float) -> tuple[Truths, Question]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator)
    x[x.abs() < 1e-3] = 0.1
    x[PLACE] = value
    truths = Truths(module, [x], "fp32")
    weights = cotangent(module(x), 3)
    return truths, Question(module.state_dict(), [x], 3, True, "all", (weights,))


@pytest.mark.parametrize("in_place", [False, True])
def test_the_cotangents_spare_a_value_within_rounding_of_a_kink(in_place: bool) -> None:
    inner = nn.Sequential(nn.Identity(), nn.GroupNorm(2, 4), nn.LeakyReLU(0.1, in_place))
    module = nn.Sequential(nn.Hardtanh(-100.0, 100.0), nn.ReLU(), *inner)
    truths, question = asked(module, 1e-9)
    before = truths.known(question).truth[GRADIENT]
    spared = truths.spared(question)
    after = truths.known(spared).truth[GRADIENT]
    assert not spared.shifts
    assert abs(float(before[PLACE])) > 1e-2
    assert abs(float(after[PLACE])) < 1e-5
    changed = torch.ne(spared.cotangents[0], question.cotangents[0])  # type: ignore[arg-type]
    assert int(changed.sum()) == 1


def test_behind_a_mean_the_truth_is_known_on_either_side() -> None:
    truths, question = asked(Averaged(), 1e-9)
    known = truths.known(truths.spared(question))
    above, below = (side[GRADIENT][PLACE] for side in known.flipped)
    assert float(above) == pytest.approx(float(known.truth[GRADIENT][PLACE]))
    assert float(below) == 0
    assert abs(float(above)) > 1e-4


def test_far_from_every_kink_the_question_stays_as_it_was() -> None:
    truths, question = asked(Averaged(), 0.5)
    assert truths.spared(question) is question
