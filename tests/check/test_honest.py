"""Honest kernels are never called wrong because of a kink, and what is spared there hides no wrong gradient.

`POSTLUDE_HONEST=200` runs that many honest implementations, other ones each time.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from check.honest import CANDIDATES, CHAINS, DTYPES, Kinked, planted, points
from postlude import reference
from postlude.chain import Chain
from postlude.check import chain_sides, kinks
from postlude.check.points import ChainPoint, chain_points, tensors_for
from postlude.check.verdict import Verdict
from postlude.check.verify import verify_chain

ASKED = os.environ.get("POSTLUDE_HONEST")
RUNS = int(ASKED or 8)
FIRST = int(time.time()) if ASKED else 0
ALL = [(name, precision, how) for name in CHAINS for precision, candidates in CANDIDATES.items() for how in candidates]


def drawn(number: int) -> tuple[str, str, str]:
    return random.Random(FIRST + number).choice(ALL)


@pytest.mark.parametrize("number", range(RUNS))
def test_an_honest_implementation_is_not_called_wrong(number: int) -> None:
    name, precision, how = drawn(number)
    kinked = CHAINS[name]
    asked = points(kinked, DTYPES[precision], FIRST % 10_000 + number)
    verdict = verify_chain(CANDIDATES[precision][how], kinked.chain, asked, precision, backward=True, nonfinite=False)
    assert verdict.outcome != "wrong", (name, precision, how, verdict)


class _Relu(torch.autograd.Function):
    """A relu with a given derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


def with_slope(slope_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Chain, Sequence[Tensor]], Tensor]:
    """Chain 61 with another derivative of its relu, from what the relu reads and what the norm makes of it."""

    def run(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        x, weight, gamma, beta = tensors
        y = F.conv_transpose3d(x, weight)
        normalised = F.group_norm(y.relu(), 4, gamma, beta)
        slope = slope_of(y, normalised).detach().to(y.dtype)
        result: Tensor = F.group_norm(_Relu.apply(y, slope), 4, gamma, beta)  # type: ignore[no-untyped-call]
        return result

    return run


def flipped_far_from_zero(y: Tensor, _: Tensor) -> Tensor:
    chosen = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 1e-3
    return (y > 0) ^ (chosen & (y.abs() > 0.1))


def too_large(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    """Gradients that are 1e-3 too large."""
    result = reference.evaluate(chain, tensors)
    return result * 1.001 - result.detach() * 0.001


def statistics_held_fixed(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    x, weight, gamma, beta = tensors
    y = F.conv_transpose3d(x, weight).relu()
    parts = y.reshape(y.shape[0], 4, -1)
    variance, mean = (one.detach() for one in torch.var_mean(parts, dim=2, correction=0, keepdim=True))
    y = ((parts - mean) * torch.rsqrt(variance + 1e-5)).reshape(y.shape)
    return y * gamma.view(-1, 1, 1, 1) + beta.view(-1, 1, 1, 1)


WRONG = {
    "no derivative for small arguments": with_slope(lambda y, _: y > 0.01),
    "derivative from another tensor": with_slope(lambda _, normalised: normalised > 0),
    "derivative flipped at one element of a thousand": with_slope(flipped_far_from_zero),
    "derivative of a leaky_relu": with_slope(lambda y, _: torch.where(y > 0, 1.0, 0.001)),
    "gradients 1e-3 too large": too_large,
    "statistics held fixed": statistics_held_fixed,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient_is_rejected(name: str) -> None:
    kinked = CHAINS["61"]
    verdict = verify_chain(WRONG[name], kinked.chain, points(kinked, torch.float32, 3), backward=True)
    assert verdict.outcome == "wrong", verdict
    assert "gradient of" in verdict.reasons[0]


def test_the_same_with_the_right_derivative_is_accepted() -> None:
    kinked = CHAINS["61"]
    honest = with_slope(lambda y, _: y > 0)
    assert verify_chain(honest, kinked.chain, points(kinked, torch.float32, 3), backward=True).right


@pytest.mark.parametrize("name", ["relu after a norm", "relu, mean", "clamp after a norm", "no convolution"])
def test_gradients_a_thousandth_too_large_are_rejected_in_other_chains(name: str) -> None:
    kinked = CHAINS[name]
    asked = chain_points(kinked.chain, kinked.shape)
    verdict = verify_chain(too_large, kinked.chain, asked, backward=True)
    assert verdict.outcome == "wrong", verdict


def one_flip_more(kinked: Kinked) -> Verdict:
    """The verdict on an implementation whose relu is on its other side at one value of each point, about 1e-6."""

    def nearest_on_the_other_side(y: Tensor, _: Tensor) -> Tensor:
        return (y > 0) ^ (y.abs() <= 2e-6)

    asked = points(kinked, torch.float32, 5, beyond=1e-6)
    return verify_chain(with_slope(nearest_on_the_other_side), kinked.chain, asked, backward=True)


def test_without_sparing_a_single_rounding_would_be_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_flip_more(CHAINS["61"]).right
    monkeypatch.setattr(chain_sides, "all_ambiguous", lambda *_: None)
    verdict = one_flip_more(CHAINS["61"])
    assert verdict.outcome == "wrong"
    assert "gradient of slot 0 (input)" in verdict.reasons[0]


def meetings_of(chain: Chain, tensors: Sequence[Tensor]) -> tuple[Tensor, list[kinks.Meeting]]:
    with kinks.Kinks() as met:
        output = reference.evaluate(chain, [tensor.requires_grad_() for tensor in tensors])
    return output, met.meetings


def test_no_gradient_reaches_the_ambiguous_elements() -> None:
    kinked = CHAINS["61"]
    tensors = planted(kinked.chain, tensors_for(kinked.chain, kinked.shape, torch.float32))
    _, own = meetings_of(kinked.chain, [tensor.clone() for tensor in tensors])
    output, exact = meetings_of(kinked.chain, [tensor.double() for tensor in tensors])
    near = kinks.all_ambiguous(exact, own)
    assert near is not None
    assert 0 < int(near[0].possible.sum()) < 20
    before = torch.randn(output.shape)
    after, left = kinks.spared(output, exact, near, before)
    assert left is None
    assert int((after != before).sum()) == int(near[0].possible.sum())
    for weights, reaches in ((before, True), (after, False)):
        (gradient,) = torch.autograd.grad(output, exact[0].result, weights.double(), retain_graph=True)
        assert (float(gradient[near[0].possible].abs().max()) > 1e-5) == reaches


def test_behind_a_mean_the_truth_is_taken_on_either_side() -> None:
    kinked = CHAINS["relu, mean"]
    tensors = planted(kinked.chain, tensors_for(kinked.chain, kinked.shape, torch.float32))
    _, own = meetings_of(kinked.chain, [tensor.clone() for tensor in tensors])
    doubles = [tensor.double() for tensor in tensors]
    output, exact = meetings_of(kinked.chain, doubles)
    near = kinks.all_ambiguous(exact, own)
    assert near is not None
    weights, left = kinks.spared(output, exact, near, torch.randn(output.shape))
    assert left is not None
    sides = []
    for shift in kinks.either_side(exact, left):
        with kinks.Kinks(shift) as moved:
            reference.evaluate(kinked.chain, doubles)
        sides.append(moved.meetings[0].result > 0)
    assert bool(sides[0][left[0]].all())
    assert not bool(sides[1][left[0]].any())
    assert torch.equal(sides[0][~left[0]], sides[1][~left[0]])
    assert weights.shape == output.shape


CALLS: dict[str, tuple[Callable[[Tensor], Any], tuple[float, ...]]] = {
    "relu": (F.relu, (0.0,)),
    "in place": (lambda x: x.clone().relu_(), (0.0,)),
    "relu6": (F.relu6, (0.0, 6.0)),
    "nn.ReLU6": (torch.nn.ReLU6(), (0.0, 6.0)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.1), (0.0,)),
    "clamp": (lambda x: x.clamp(-0.5, max=0.5), (-0.5, 0.5)),
    "clamp, one bound": (lambda x: torch.clamp(x, min=0.25), (0.25,)),
    "clamp_max": (lambda x: x.clamp_max(0.25), (0.25,)),
    "hardtanh": (F.hardtanh, (-1.0, 1.0)),
    "hardswish": (F.hardswish, (-3.0, 3.0)),
    "threshold": (lambda x: F.threshold(x, 0.5, 0.0), (0.5,)),
    "maximum": (lambda x: torch.maximum(x, torch.zeros(())), (0.0,)),
    "amax": (lambda x: torch.amax(x, dim=[1]), (0.0,)),
    "max": (lambda x: x.max(dim=1, keepdim=True), (0.0,)),
    "selu": (F.selu, (0.0,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_with_kinks_are_seen(name: str) -> None:
    call, bounds = CALLS[name]
    with kinks.Kinks() as met:
        call(torch.randn(3, 4, requires_grad=True))
    assert [one.bounds for one in met.meetings] == [bounds]
    assert met.meetings[0].value.shape == met.meetings[0].result.shape


@pytest.mark.parametrize(
    "call", [F.silu, F.elu, torch.tanh, lambda x: x.max(), F.gelu, lambda x: x.clamp(max=torch.inf)]
)
def test_smooth_ones_are_not(call: Callable[[Tensor], Any]) -> None:
    with kinks.Kinks() as met:
        call(torch.randn(3, 4))
    assert not met.meetings


def test_a_value_written_at_a_bound_exactly_is_not_ambiguous() -> None:
    x = torch.randn(1000)
    with kinks.Kinks() as own:
        F.relu(F.relu(x))
    with kinks.Kinks() as exact:
        F.relu(F.relu(x.double()))
    near = kinks.all_ambiguous(exact.meetings, own.meetings)
    assert near is None or not bool(near[1].possible[x < -1e-3].any())


def test_the_points_are_planted() -> None:
    kinked = CHAINS["61"]
    found = [one for one in points(kinked, torch.float32, 3) if isinstance(one, ChainPoint)][:6]
    for one in found:
        _, exact = meetings_of(kinked.chain, [tensor.double() for tensor in one.tensors])
        assert float(exact[0].value.abs().min()) < 1e-7
