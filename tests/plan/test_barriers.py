"""Where a program can be cut: what precedes a norm is computed once, unless something after it reads further back."""

from __future__ import annotations

import dataclasses

import pytest

from cases import CASES, Builder, Case, conv
from plan.test_convolve import card
from plan.test_lower import problem
from postlude.chain import Cast, Chain, Value
from postlude.plan import KeepMoments, Plan
from postlude.plan.barriers import first_barrier, is_all_that_is_read
from postlude.plan.gpu import lower_for_gpu
from tracing import storing_raw


def start() -> Builder:
    return Builder(2, conv(2, (16, 32), padding=1))


def cast_to(dtype: str, built: Builder) -> Builder:
    built.steps.append(Cast(built.value, dtype))
    return built


# chain, whether the last pass goes on with the norm
CHAINS: dict[str, tuple[Chain, bool]] = {
    "a word": (start().op("silu").norm(4).op("relu").chain(), True),
    "nothing before the norm": (start().norm(4).chain(), True),
    "words that read each other": (start().op("silu").op("mul", Value(0)).norm(4).chain(), True),
    "the norm's own input after it": (start().op("silu").norm(4).op("add", Value(1)).chain(), True),
    "the convolution's result after it": (start().op("silu").norm(4).op("add", Value(0)).chain(), False),
    "a word before the last": (start().op("silu").op("tanh").norm(4).op("mul", Value(1)).chain(), False),
    "tensors": (start().op("mul", "row").op("add", "full").norm(4).chain(), True),
    "statistics of the batch": (start().op("relu").batch_norm().chain(), True),
    "two norms": (start().op("relu").norm(4).op("relu").norm(2).chain(), True),
}


def planned(chain: Chain, **changes: object) -> Plan:
    given = problem(chain, (32, 16, 64, 64), device="cuda", precision="fp32", **changes)
    plan = lower_for_gpu(chain, given, card(90), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    return plan


@pytest.mark.parametrize("name", CHAINS)
def test_the_last_pass_goes_on_with_the_norm(name: str) -> None:
    chain, resumes = CHAINS[name]
    norm, plan = first_barrier(chain), planned(chain)
    assert norm is not None
    assert is_all_that_is_read(chain, norm) == resumes
    assert plan.resumes_at == (norm if resumes else 0)
    assert plan.passes[0].sink == KeepMoments(squares=True, stores=True, finished=resumes)
    assert (plan.passes[0].last, plan.passes[1].first) == (norm - 1, norm if resumes else 1)
    assert ("twice" in str(plan.reasons)) != resumes


@pytest.mark.parametrize("name", CHAINS)
def test_storing_raw_begins_with_the_convolutions_result(name: str) -> None:
    plan = planned(CHAINS[name][0])
    raw = storing_raw(plan)
    assert raw.resumes_at == 0
    assert raw.passes[0].sink == KeepMoments(squares=True, stores=True)
    assert raw.passes[1] == dataclasses.replace(plan.passes[1], first=1)
    assert storing_raw(raw) == raw


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_training_never_resumes(case: Case) -> None:
    given = problem(case.chain, case.shape, device="cuda", needs_grad=True)
    plan = lower_for_gpu(case.chain, given, card(90), even_if_slower=True)
    assert not isinstance(plan, Plan) or plan.resumes_at == 0


def test_neither_does_pytorchs_convolution() -> None:
    chain = Builder(2, conv(2, (16, 32), dilation=2)).op("silu").norm(4).chain()
    plan = planned(chain)
    assert (plan.own, plan.resumes_at, storing_raw(plan)) == (None, 0, plan)


@pytest.mark.parametrize(
    ("built", "resumes"),
    [
        (cast_to("float32", start().op("relu")).norm(4), True),  # as autocast has it: nothing is wider than it was
        (cast_to("float32", start()).op("pow", exponent=2).norm(4), False),  # squares that fp16 cannot hold
        (start().op("mul", "channel").norm(4), False),  # by a vector in fp32
        (start().op("relu").norm(4).op("mul", "channel"), True),
    ],
    ids=lambda b: str(b.chain()) if isinstance(b, Builder) else str(b),
)
def test_what_is_wider_than_the_convolutions_result_is_not_stored_as_narrow(built: Builder, resumes: bool) -> None:
    chain = built.chain()
    given = problem(chain, (32, 16, 64, 64), device="cuda")
    convolved = [dataclasses.replace(spec, dtype="float16") for spec in given.tensors[:3]]
    given = dataclasses.replace(given, tensors=(*convolved, *given.tensors[3:]))
    plan = lower_for_gpu(chain, given, card(90), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.own is not None
    assert (plan.resumes_at > 0) == resumes
