"""The pass that goes on with the norm, by Triton's interpreter: what precedes it is computed once, and never twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from postlude import reference
from postlude.chain import Cast, Chain, Slot, Value
from postlude.check import tensors_for
from postlude.plan import Plan
from postlude.plan.passes import KeepMoments
from postlude.stages import forward
from run.test_phases import planned
from tracing import run_plan, storing_raw

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("poisoned_memory")]


def start(**settings: int) -> Builder:
    return Builder(2, conv(2, (3, 4), **settings))  # type: ignore[arg-type]


CHAINS: dict[str, tuple[Chain, bool]] = {
    "words and tensors": (
        start(padding=1, bias=False).op("silu").op("mul", "row").norm(2).op("add", "full").op("add", "row").chain(),
        True,
    ),
    "a vector on both sides": (start(padding=1).op("mul", "channel").norm(2).op("add", Slot(3)).chain(), True),
    "the norm's input again": (start(padding=1).op("tanh").norm(None).op("mul", Value(1)).chain(), True),
    "the result again": (start(padding=1).op("tanh").norm(None).op("add", Value(0)).chain(), False),
    "by phase": (
        Builder(2, conv(2, (3, 4), transposed=True, stride=2)).op("mul", "channel").op("mish").norm(2).chain(),
        True,
    ),
    "statistics of the batch": (start(padding=1).op("gelu", approximate="none").batch_norm().chain(), True),
}


def errors(chain: Chain, tensors: Sequence[Tensor], *plans: Plan) -> list[float]:
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    found = []
    for plan in plans:
        with torch.no_grad():
            off = (run_plan(plan, [t.clone() for t in tensors]).double() - truth).abs().max() / truth.abs().max()
        found.append(float(torch.nan_to_num(off, nan=torch.inf)))
    return found


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", CHAINS)
def test_results_are_right_with_the_steps_once_and_twice(name: str, layout: str) -> None:
    chain, resumes = CHAINS[name]
    tensors = tensors_for(chain, (2, 3, 4, 5), torch.float32, "cpu", 0, "normal", layout)  # type: ignore[arg-type]
    plan = planned(chain, tensors)
    assert (plan.resumes_at > 0) == resumes
    plans = [plan, storing_raw(plan)] if resumes and layout == "contiguous" else [plan]
    assert max(errors(chain, tensors, *plans)) < 1e-5


def test_a_pass_that_resumes_elsewhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: steps taken twice, and steps that nobody takes."""
    chain, _ = CHAINS["a vector on both sides"]
    tensors = tensors_for(chain, (2, 3, 4, 5), torch.float32, "cpu", 0, "normal")
    plan = planned(chain, tensors)
    first, last = plan.passes
    assert isinstance(first.sink, KeepMoments)
    twice = dataclasses.replace(plan, passes=(first, dataclasses.replace(last, first=1)))
    assert errors(chain, tensors, twice)[0] > 1e-2
    finish = forward.finish_pass
    monkeypatch.setattr(forward, "finish_pass", lambda _, *rest: finish(plan, *rest))
    assert errors(chain, tensors, storing_raw(plan))[0] > 1e-2


def test_squares_that_16_bits_cannot_hold_are_not_stored_in_them() -> None:
    built = start(padding=1)
    built.steps.append(Cast(Value(0), "float32"))
    chain = built.op("mul", 300.0).op("pow", exponent=2).norm(2).chain()
    x, weight, bias, *rest = tensors_for(chain, (2, 3, 4, 5), torch.float32, "cpu", 0, "normal")
    tensors = [x.half(), weight.half(), bias.half(), *rest]
    plan = planned(chain, tensors)
    first, last = plan.passes
    stored = dataclasses.replace(first, sink=KeepMoments(squares=True, stores=True, finished=True))
    narrow = dataclasses.replace(plan, passes=(stored, dataclasses.replace(last, first=4)))
    right, wrong = errors(chain, tensors, plan, narrow)
    assert right < 1e-2
    assert wrong > 1e2
