"""The whole vocabulary and its derivatives compiled ahead of time, in chains of many words."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cases import WORDS
from kernels import offline
from kernels.offline import Compiled
from plan.test_convolve import card as machine_of
from postlude.chain import Chain, Operand, Pointwise, Role, Scalar, Slot, Step, Value
from postlude.plan import Plan
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.problem import Layout, Problem, Spec, memory_format
from postlude.stages.gradient import gradient_passes
from postlude.stages.normalize import finish_pass
from postlude.steps import OPERANDS, pass_slots
from tracing import traced_calls

pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]
SHAPE = (2, 32, 64, 64)


def chains() -> list[Chain]:
    """Every row of the table that a card takes, one after the other, as many as five tensors last for."""
    made: list[Chain] = []
    steps: list[Step] = []
    roles: list[Role] = ["input"]
    for case in WORDS:
        (step,) = case.chain.steps
        assert isinstance(step, Pointwise)
        if step.op == "detach":  # which ends all gradients
            continue
        others = [operand for operand in step.operands[1:] if isinstance(operand, Slot)]
        if len(steps) == 12 or len(roles) - 1 + len(others) > OPERANDS - 1:  # the last is a size beside a row
            made.append(Chain(2, None, tuple(steps), tuple(roles)))
            steps, roles = [], ["input"]
        operands: list[Operand] = [Value(len(steps))]
        for operand in step.operands[1:]:
            if isinstance(operand, Slot):
                roles.append(case.chain.roles[operand.index])
                operand = Slot(len(roles) - 1)
            operands.append(operand)
        steps.append(dataclasses.replace(step, operands=tuple(operands)))
    return [*made, Chain(2, None, tuple(steps), tuple(roles))]


def compiled(chain: Chain, dtype: str, layout: Layout) -> list[Compiled]:
    form = memory_format(layout, 2)
    value = torch.empty(SHAPE, dtype=getattr(torch, dtype), device="meta", memory_format=form)
    by_role = {"full": value, "one": value.new_empty(1), "channel": value.new_empty(SHAPE[1])}
    by_role["row"] = value.new_empty((*SHAPE[:2], 1, 1))
    tensors = [by_role.get(role, value) for role in chain.roles]
    specs = [Spec(tuple(t.shape), dtype, layout if t is value else "contiguous") for t in tensors]
    plan = lower_for_gpu(chain, Problem(tuple(specs), "cuda", "auto", False), machine_of(90), True)
    assert isinstance(plan, Plan), plan
    needs = frozenset(pass_slots(chain, len(chain.steps)))

    def both(value: Tensor, dy: Tensor, *tensors: Tensor) -> None:
        finish_pass(plan, value, None, tensors)
        gradient_passes(plan, needs, value, None, dy, tensors)

    found = offline.compiled_calls(traced_calls(both, value, value, *tensors), 90)
    assert len(found) >= 2  # and a third that adds up vectors' gradients, where there are any
    return found


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "contiguous"), ("bfloat16", "channels_last")])
def test_every_word_compiles(dtype: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    found = [one for chain in chains() for one in compiled(chain, dtype, layout)]
    assert all(one.shared <= offline.CARDS[90] for one in found)


def test_float64_stays_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that passed through fp32 on its way would show as a conversion."""
    offline.use_card(monkeypatch, 90)
    chain = Chain(2, None, (Pointwise("clamp_min", (Value(0),), (("bound", 0.1),)), _ADD), ("input",))
    forward, backward = compiled(chain, "float64", "contiguous")
    assert "cvt.f64.f32" not in forward.ptx
    assert "cvt.f64.f32" not in backward.ptx


_ADD = Pointwise("maximum", (Value(1), Scalar(0.3)))
