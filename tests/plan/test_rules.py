"""Every rule as an identity in float64, with random parameters of both signs; and what it must not be used for."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import CHAIN_23, CHAIN_61, Builder, conv
from plan.test_convolve import card
from plan.test_lower import CPU, problem
from postlude import reference
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.plan import Plan, lower, problem_of
from postlude.plan.phases import Axis
from postlude.plan.rules import AFFINE, MEAN, PHASES, RESIDUES, RULES, TURNED, rule_lines, rules_of
from postlude.run.execute import execute

RELU = Builder(3, conv(3, (3, 4))).norm(2).op("relu").reduce("mean", "space").chain()
SCALED = Builder(3, conv(3, (3, 4))).norm(2).op("mul", "channel").op("add", 0.5).reduce("sum", "space").chain()
STRIDED = Builder(2, conv(2, (64, 64), transposed=True, stride=2, padding=1)).norm(8).chain()


def planned(chain: Chain, shape: tuple[int, ...], trains: bool = False) -> Plan:
    given = dataclasses.replace(problem(chain, shape, device="cuda"), needs_grad=trains)
    plan = lower(chain, given, card(90), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    return plan


@pytest.mark.parametrize(
    ("chain", "shape", "trains", "rules"),
    [
        (CHAIN_23, (128, 3, 24, 32, 32), False, {MEAN}),
        (CHAIN_23, (128, 3, 24, 32, 32), True, {MEAN, AFFINE}),
        (CHAIN_61, (16, 64, 32, 32, 32), False, {TURNED}),
        (STRIDED, (8, 64, 64, 64), False, {PHASES}),
        (Builder(2, conv(2, (64, 64), stride=2)).norm(8).chain(), (8, 64, 64, 64), False, {RESIDUES}),
        (Builder(3, conv(3, (64, 64), padding=1)).norm(8).chain(), (2, 64, 32, 32, 32), False, set()),
    ],
)
def test_a_plan_says_which_it_rests_on(chain: Chain, shape: tuple[int, ...], trains: bool, rules: set[str]) -> None:
    plan = planned(chain, shape, trains)
    assert set(rules_of(plan)) == rules
    assert all(name in line for name, line in zip(rules_of(plan), rule_lines(plan)))


def test_mean_through_the_norm() -> None:
    for chain in (CHAIN_23, SCALED):
        tensors = tensors_for(chain, (3, 3, 5, 6, 7), torch.float64)
        with torch.no_grad():
            plan = lower(chain, problem_of(tensors), CPU, even_if_slower=True)
            assert isinstance(plan, Plan)
            assert MEAN in rules_of(plan)
            ours = execute(chain, plan, tensors)
        torch.testing.assert_close(ours, reference.evaluate(chain, tensors), rtol=1e-12, atol=1e-12)


def test_what_is_not_affine_is_not_taken_through_the_norm() -> None:
    tensors = tensors_for(RELU, (3, 3, 5, 6, 7), torch.float64)
    plan = lower(RELU, problem_of(tensors), CPU, even_if_slower=True)
    assert not isinstance(plan, Plan) or MEAN not in rules_of(plan)


def test_by_residue() -> None:
    x, weight, stride = torch.randn(2, 3, 13, 11).double(), torch.randn(4, 3, 3, 3).double(), 2
    found = torch.zeros(())
    for y, at in itertools.product(range(stride), repeat=2):
        part = F.conv2d(x[:, :, y::stride, at::stride], weight[:, :, y::stride, at::stride])
        found = found + part[:, :, :6, :5]  # of the result's size; a residue may have one more
    torch.testing.assert_close(found, F.conv2d(x, weight, stride=stride), rtol=1e-12, atol=1e-12)


def test_transposed_as_plain() -> None:
    turned = conv(3, (3, 4), transposed=True, padding=1, bias=False)
    plain = turned.as_plain()
    assert plain is not None
    x, weight = torch.randn(2, 3, 4, 5, 6).double(), torch.randn(3, 4, 3, 3, 3).double()
    flipped = weight.flip(2, 3, 4).transpose(0, 1)
    expected = F.conv_transpose3d(x, weight, padding=1)
    torch.testing.assert_close(F.conv3d(x, flipped, padding=plain.padding), expected, rtol=1e-12, atol=1e-12)
    assert dataclasses.replace(turned, stride=(2, 2, 2)).as_plain() is None  # with strides it is not


def _phase(x: Tensor, weight: Tensor, axes: tuple[Axis, Axis], at: tuple[int, int]) -> Tensor:
    """The outputs of one phase: its taps, in the order of the inputs that they read, over an input in zeros."""
    phases = [axis.phase(remainder) for axis, remainder in zip(axes, at)]
    rows, columns = (list(axis.taps(remainder)) for axis, remainder in zip(axes, at))
    kernel = weight[:, :, rows][:, :, :, columns].transpose(0, 1)
    wide = F.pad(x, (9, 9, 9, 9))
    starts = [9 + phase.first for phase in phases]
    ends = [start + phase.outputs + phase.taps - 1 for start, phase in zip(starts, phases)]
    return F.conv2d(wide[:, :, starts[0] : ends[0], starts[1] : ends[1]], kernel)


@pytest.mark.parametrize(("kernel", "stride", "padding", "extra"), [(3, 2, 1, 1), (4, 2, 1, 0), (5, 3, 2, 1)])
def test_by_phase(kernel: int, stride: int, padding: int, extra: int) -> None:
    x, weight = torch.randn(2, 3, 5, 4).double(), torch.randn(3, 4, kernel, kernel).double()
    expected = F.conv_transpose2d(x, weight, stride=stride, padding=padding, output_padding=extra)
    axes = tuple(Axis(n, kernel, stride, padding, out) for n, out in zip(x.shape[2:], expected.shape[2:]))
    found = torch.full_like(expected, torch.nan)
    for at in itertools.product(range(stride), repeat=2):
        found[:, :, at[0] :: stride, at[1] :: stride] = _phase(x, weight, axes, at)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_affine_gradient() -> None:
    """Through group_norm and a mean the gradient is a + b · v in each sample and channel; through relu it is not."""
    v = torch.randn(2, 6, 4, 5).double().requires_grad_()
    gamma, beta, dy = (torch.randn(n).double() for n in (6, 6, 2))

    def deviation(result: Tensor) -> Tensor:
        (dv,) = torch.autograd.grad(result, v, dy)
        points, gradients = v.detach().flatten(2), dv.flatten(2)
        slope = (gradients[..., 1] - gradients[..., 0]) / (points[..., 1] - points[..., 0])
        line = gradients[..., :1] + slope[..., None] * (points - points[..., :1])
        return (gradients - line).abs().max() / gradients.abs().max()

    norm = F.group_norm(v, 2, gamma, beta)
    assert deviation(norm.mean((1, 2, 3))) < 1e-10
    assert deviation(F.relu(F.group_norm(v, 2, gamma, beta)).mean((1, 2, 3))) > 1e-3


def test_every_rule_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
    for name in RULES:
        assert f"**{name}**" in text, name
