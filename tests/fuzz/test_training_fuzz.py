"""Random training steps with our own convolutions, by Triton's interpreter in two half-precision planes.

`POSTLUDE_FUZZ=300` draws that many, anew every time, at a few seconds each.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import Builder
from fuzz.drawing import plain_convolutions
from postlude import reference
from postlude.chain import Chain, Value
from postlude.check import tensors_for
from postlude.plan import Plan, lower, problem_of
from postlude.plan.gemm import Gemm
from postlude.run.execute import prepare
from run.test_gpu import CARD

ASKED = os.environ.get("POSTLUDE_FUZZ")
EXAMPLES = int(ASKED or 3)
KINDS = ("plain", "from its result", "norm", "moments", "before a mean")
pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]


@st.composite
def steps_of_training(draw: st.DrawFn) -> tuple[Chain, tuple[int, ...], str, str]:
    """Channels on both sides of what makes a row of a product two or four positions; sizes that do not divide."""
    how, space = draw(plain_convolutions((1, 3, 8, 20, 40, 66), (4, 16, 17, 32, 33), 5, most_stride=3))
    chain = _followed(draw, Builder(2, how), draw(st.sampled_from(KINDS)))
    layout, memory = draw(st.sampled_from(("contiguous", "channels_last"))), draw(st.sampled_from(("default", "lean")))
    return chain, (draw(st.integers(1, 3)), how.in_channels, *space), layout, memory


def _followed(draw: st.DrawFn, start: Builder, kind: str) -> Chain:
    """Smooth words alone: a kink would turn a rounding into a jump."""
    if kind == "plain":
        start = start.op(draw(st.sampled_from(("silu", "mish"))))
        return (start.op("mul", "channel") if draw(st.booleans()) else start.op("mul", Value(0))).chain()
    if kind == "from its result":
        return start.op("add", "full").op(draw(st.sampled_from(("tanh", "sigmoid")))).chain()
    if kind == "norm":
        return start.op("silu").norm(1).op("silu").chain()
    if kind == "moments":
        return start.norm(1).reduce("mean", "space").chain()
    return start.op("silu").norm(1).reduce("mean", "space").chain()


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=ASKED is None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(steps_of_training())
def test_gradients_are_float64s(drawn: tuple[Chain, tuple[int, ...], str, str]) -> None:
    chain, shape, layout, memory = drawn
    note(f"{chain} {shape} {layout} {memory}")
    tensors = [t.requires_grad_() for t in tensors_for(chain, shape, torch.float32, layout=layout)]  # type: ignore[arg-type]
    problem = dataclasses.replace(problem_of(tensors, "fp32", memory), device="cuda", needs_grad=True)
    plan = lower(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan)
    assert isinstance(plan.own, Gemm)
    assert plan.gradients.of_weight is not None
    result = prepare(chain, plan)(tensors)
    dy = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    ours = (result, *torch.autograd.grad(result, tensors, dy))
    exact, pytorch = (_through_pytorch(chain, tensors, dy, dtype) for dtype in (torch.float64, torch.float32))
    for one, true, theirs in zip(ours, exact, pytorch, strict=True):
        error, own = (float((each.double() - true).abs().max()) for each in (one, theirs))
        assert error <= 2e-5 * float(true.abs().max()) + 4 * own + 1e-5 * float(dy.abs().max())


def _through_pytorch(chain: Chain, tensors: Sequence[Tensor], dy: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    result = reference.evaluate(chain, leaves)
    return result, *torch.autograd.grad(result, leaves, dy.to(dtype))
