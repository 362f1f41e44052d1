"""The check of a site: on the plan that runs, in the layout that it is for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cases import Builder, conv
from machines import SMALL_H200
from postlude import site_check
from postlude.chain import Chain
from postlude.check.effort import Budget, largest_value
from postlude.check.points import tensors_for
from postlude.check.verdict import Verdict
from postlude.hardware import Machine
from postlude.plan import Plan, Problem, Refusal, lower, problem_of
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


def test_a_crop_is_planned_as_the_whole_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layout that the graph asks for as well."""
    given = [x.detach() for x in tensors_for(CHAIN, SHAPE, torch.float32, "cpu", 0)]
    given[0] = given[0].contiguous(memory_format=torch.channels_last)
    problem = problem_of(given, "fp32", "lean", "pytorch", "channels_last")
    plan, planned = lower(CHAIN, problem, SMALL_H200, even_if_slower=True), list[Problem]()
    assert isinstance(plan, Plan)

    def spied(chain: Chain, problem: Problem, machine: Machine, **how: bool) -> Plan | Refusal:
        planned.append(problem)
        return lower(chain, problem, machine, **how)

    monkeypatch.setattr(site_check, "lower", spied)
    call = PlannedRun(CHAIN, problem, (False,) * len(given), plan, prepare(CHAIN, plan))
    samples, run, _, notes = site_check._piece(call, given, Budget(1e15, largest_value(CHAIN, (1, 4, 5, 5))), 3)
    run(CHAIN, samples)
    assert "crop" in str(notes)
    assert [(one.settings, one.x.layout) for one in planned] == [(problem.settings, "channels_last")]
