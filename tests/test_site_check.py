"""The check of a site: on the plan that runs, in the layout that it is for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cases import Builder, conv
from machines import SMALL_H200
from postlude import site_check
from postlude.check.effort import Budget, largest_value
from postlude.check.points import tensors_for
from postlude.check.verdict import Verdict
from postlude.plan import Plan, lower, problem_of
from postlude.run.execute import prepare
from postlude.run.ledger import PlannedRun

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # infinities are tried

CHAIN = Builder(2, conv(2, (4, 8))).op("sub", 0.5).op("hardswish").chain()
SHAPE = (5, 4, 7, 7)


def verdict_on_two_of_five(monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """In training, channels-last, by the kernels of a GPU in Triton's interpreter."""
    budget = Budget(1e15, largest_value(CHAIN, (2, *SHAPE[1:])))
    monkeypatch.setattr(site_check, "_budget", lambda _: budget)
    monkeypatch.setattr(site_check, "LARGE", 1)  # so that three points are enough
    x, *others = tensors_for(CHAIN, SHAPE, torch.float32, "cpu", 0)
    given = [x.contiguous(memory_format=torch.channels_last), *others]
    wanting = [tensor.detach().requires_grad_() for tensor in given]
    problem = dataclasses.replace(problem_of(wanting, "fp32"), device="cuda")
    plan = lower(CHAIN, problem, SMALL_H200, even_if_slower=True)
    assert isinstance(plan, Plan)
    return site_check._judge(PlannedRun(CHAIN, problem, (True,) * len(given), plan, prepare(CHAIN, plan)), given)


def test_a_few_samples_are_judged_in_the_batch_and_layout_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict_on_two_of_five(monkeypatch).outcome == "right"


def test_another_layout_than_the_plans_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: samples are put into the batch as PyTorch does, which gives up channels-last."""
    monkeypatch.setattr(site_check, "laid_out", lambda tensor, *_: tensor)
    assert "planned for an input that is channels_last, not contiguous" in str(verdict_on_two_of_five(monkeypatch))
