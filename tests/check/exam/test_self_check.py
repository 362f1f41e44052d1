"""Mutants of a reference are made from its own operators; the examination rejects them, a weaker one does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from check import corpus
from postlude.check import budget, deviations
from postlude.check.exam import Exam, Rules, self_check
from postlude.check.exam.self_check import mutated, mutations_of
from postlude.check.sides import Side

REFERENCES = (*corpus.SIZES, *sorted(path.stem for path in (corpus.FOLDER / "references").glob("*.py")))
# What float64 does not see: rolling before a mean over everything changes nothing.
UNCHANGED = {
    "conv3d_group_norm_mean": {
        "convolution: shifted by one place",
        "group_norm: channels permuted",
        "group_norm: shifted by one place",
    }
}
# References of one operator have few mutants, and integers, which have no order to permute, none.
FEW = {"cross_entropy": 5, "first_position": 8, "row_argmax": -1, "row_softmax": 7}


@pytest.mark.parametrize("name", REFERENCES)
def test_every_mutant_is_rejected(name: str) -> None:
    checked = self_check(corpus.problem(name).exam)
    assert checked.accepted == ()
    assert set(checked.unchanged) == UNCHANGED.get(name, set())
    assert len(checked.rejected) > FEW.get(name, 20)
    assert checked.left_out == 0
    assert str(checked).startswith(f"{len(checked.rejected)} of {len(checked.rejected)} mutants")


def test_the_mistakes_that_people_make_are_among_them() -> None:
    names = {str(one) for one in mutations_of(corpus.problem("conv_transpose3d_relu_group_norm").exam)}
    assert names >= {
        "convolution: kernel flipped",
        "convolution: weight read as (out, in)",
        "convolution: sums in half precision",
        "convolution: border left out",
        "convolution: channels permuted",
        "convolution: shifted by one place",
        "relu: left out",
        "relu: NaN made 0",
        "group_norm: no γ",
        "group_norm: no β",
        "group_norm: γ per group",
        "group_norm: no eps",
        "group_norm: eps 100 times too large",
        "group_norm: unbiased variance",
        "group_norm: statistics per position",
        "group_norm: statistics over the batch",
        "group_norm: 4 groups",
    }


def test_points_without_nan_see_no_difference_and_say_so() -> None:
    asked = corpus.problem("conv_transpose3d_relu_group_norm")
    weak = Exam(asked.model, asked.exam.shapes["working"].inputs, Rules(), remember=True)
    weak.cases = [case for case in weak.cases if not case.is_nonfinite]
    assert self_check(weak).unchanged == ("relu: NaN made 0",)


def test_a_rule_that_is_too_loose_accepts_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, number in ((budget, "RMS_FACTOR"), (budget, "WORST_FACTOR"), (deviations, "TOLERANCE")):
        monkeypatch.setattr(module, number, 1e4)
    checked = self_check(corpus.problem("linear_clamp_scale").exam)
    assert "addmm: operands in half precision" in checked.accepted
    assert "accepted: addmm: " in str(checked)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu_(self.conv(x)).mul_(2.0)


def test_operators_that_write_in_place_are_changed_in_place() -> None:
    exam = Exam(InPlace(), [torch.rand(3, 2, 6, 7)], Rules(), remember=True)
    found = {str(one): one for one in mutations_of(exam)}
    question = exam.sheet(exam.cases[0]).question
    side = Side(InPlace())
    right = side.ask(question)["output"]
    assert (right >= 0).all()
    assert (mutated(side, question, found["relu: left out"])["output"] < 0).any()
    assert torch.equal(mutated(side, question, found["mul: left out"])["output"], right / 2)
    assert self_check(exam).accepted == ()


def test_in_a_coarse_mode_half_precision_is_no_mistake() -> None:
    exam = Exam(InPlace().bfloat16(), [torch.rand(3, 2, 6, 7).bfloat16()], Rules(), remember=True)
    assert not any("half precision" in one.name for one in mutations_of(exam))
    assert self_check(exam).accepted == ()
