"""Bounds are found where a reference has them, and points are added until both sides of each are tried."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from postlude.check.exam import Exam, Rules, examine
from postlude.check.exam.bounds import Bound, BoundWatch
from postlude.check.modules import verify_modules
from postlude.check.sides import InProcess


class Clamped(nn.Module):
    """The bound at 30 is far from what a linear layer gives."""

    def __init__(self, low: float = -1.0, high: float = 30.0) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 10)
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(self.linear(x), self.low, self.high)


class WithoutTheUpperBound(Clamped):
    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(self.linear(x), min=self.low)


INPUTS = (torch.rand(8, 12),)


def test_operators_with_bounds_are_seen() -> None:
    x = torch.tensor([-4.0, -1.0, 2.0, 5.0])
    with BoundWatch() as watch:
        torch.clamp(x, -2, 9)
        nn.functional.hardtanh(x)
        nn.functional.relu_(x.clone())
        torch.minimum(x, torch.tensor(3.0))
        nn.functional.softplus(x, beta=2.0)
        x + 1
    found = {(bound.operator, bound.value): share for bound, share in watch.shares.items()}
    assert found == {
        ("clamp", -2.0): 0.25,
        ("clamp", 9.0): 0.0,
        ("hardtanh", -1.0): 0.25,
        ("hardtanh", 1.0): 0.5,
        ("relu", 0.0): 0.5,
        ("minimum", 3.0): 0.25,
        ("softplus", 10.0): 0.0,
    }
    assert str(Bound("clamp", 0, 9.0)) == "clamp at 9"
    assert {bound.value for bound in watch.reached} == {-2.0, -1.0, 1.0, 0.0, 3.0}


def test_a_point_is_added_for_a_bound_that_no_other_reaches() -> None:
    exam = Exam(Clamped(), INPUTS, Rules())
    assert [case.stretch for case in exam.cases if case.stretch != 1.0] == [16.0]
    assert exam.left_out == []
    assert [case for case in Exam(Clamped(high=0.5), INPUTS, Rules()).cases if case.stretch != 1.0] == []


class Summed(Clamped):
    """A sum of exponentials hides everything but the largest value of a row."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.logsumexp(torch.clamp(4 * self.linear(x), -10, 10), 1)


class SummedWithoutTheLowerBound(Summed):
    def forward(self, x: Tensor) -> Tensor:
        return torch.logsumexp(torch.clamp(4 * self.linear(x), max=10), 1)


def test_a_bound_that_a_reduction_hides_is_seen_where_few_values_are_left_beyond_it() -> None:
    exam = Exam(Summed(), INPUTS, Rules())
    assert {case.state_shift > 0 for case in exam.cases if case.state_shift} == {False, True}
    assert examine(exam, InProcess(SummedWithoutTheLowerBound())).outcome == "wrong"
    exam.cases = [case for case in exam.cases if not case.state_shift]
    assert examine(exam, InProcess(SummedWithoutTheLowerBound())).right


def test_that_point_sees_that_the_bound_is_gone() -> None:
    verdict = verify_modules(Clamped(), WithoutTheUpperBound(), INPUTS)
    assert verdict.outcome == "wrong", verdict
    exam = Exam(Clamped(), INPUTS, Rules())
    exam.cases = [case for case in exam.cases if case.family in ("hierarchical", "normal") and case.name != "bounds"]
    assert examine(exam, InProcess(WithoutTheUpperBound())).right


def test_a_bound_that_cannot_be_reached_is_said() -> None:
    class Far(Clamped):
        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(torch.sigmoid(self.linear(x)), self.low, self.high)

    exam = Exam(Far(), INPUTS, Rules())
    assert exam.left_out == ["values on both sides of clamp at -1, clamp at 30: no point was found that has them"]
