"""The gradient passes run by Triton's interpreter, against float64 autograd from the convolution's result on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import BY_NAME, CASES, Builder, Case, conv
from postlude import reference, reverse
from postlude.chain import Cast, Chain, Normalize, Pointwise, Slot, Value
from postlude.check import tensors_for
from postlude.expressions import Gradient
from postlude.plan import Plan, problem_of
from postlude.plan.barriers import last_fused_step, over_channels, row_norm
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.problem import memory_format
from postlude.stages.batch import combine_batch
from postlude.stages.gradient import Gradients, gradient_passes
from postlude.stages.normalize import combine_moments, finish_pass, moments_pass
from postlude.stages.rows import rows_gradient
from postlude.steps import pass_slots
from run.test_gpu import CARD, SMALL, library_convolution  # noqa: F401, a fixture
from tracing import kernel_calls, run_stage, traced_calls

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("library_convolution", "poisoned_memory"),
]
Moments = tuple[Tensor, Tensor] | None


def extra(name: str, builder: Builder, shape: tuple[int, ...] = (2, 6, 5, 7)) -> Case:
    return Case(name, builder.chain(), shape)


EXTRA = [
    extra("x · silu(x) after the norm", Builder(2).norm(2).op("silu").op("mul", Value(1)).op("mul", Value(3))),
    extra("relu norm", Builder(2).op("relu").norm(2), (1, 4, 12, 13)),
    extra("square", Builder(2).op("mul", Value(0)).norm(1)),
    extra("residual twice", Builder(2).norm(3).op("add", "full").op("silu").op("mul", Slot(3))),
    extra("two residuals", Builder(2).op("mul", "full").norm(2).op("relu").op("add", "full")),
    extra(
        "vectors on both sides",
        Builder(2, conv(2, (6, 8), bias=False)).op("mul", "channel").op("add", "channel").norm(4).op("mul", "channel"),
    ),
    extra(
        "vectors after the norm",
        Builder(2, conv(2, (6, 8))).norm(2, affine=False).op("mul", "channel").op("silu").op("add", "channel"),
    ),
    extra(
        "vectors shared over the norm and with it",
        Builder(2).op("mul", "channel").norm(3).op("silu").op("mul", Slot(1)).op("mul", Slot(2)),
    ),
    extra("gelu both ways", Builder(2).op("gelu", approximate="none").norm(None).op("gelu", approximate="tanh")),
    extra("clamp_min and leaky_relu", Builder(2).op("leaky_relu", slope=0.3).norm(6).op("clamp_min", bound=-0.2)),
    extra("one group without affine", Builder(3).op("silu").norm(1, affine=False), (2, 5, 4, 3, 5)),
    extra("value from before the norm", Builder(2).op("relu").norm(2).op("mul", Value(0)).op("add", Value(1))),
    extra("no norm", Builder(2, conv(2, (6, 5))).op("silu").op("mul", "channel").op("mul", Value(0))),
    extra(
        "rows on both sides",
        Builder(2, conv(2, (6, 8), bias=False)).op("mul", "row").op("silu").norm(4).op("mul", "row").op("add", "row"),
        (3, 6, 5, 7),
    ),
    extra("a row shared over the norm", Builder(2).op("mul", "row").norm(3).op("silu").op("mul", Slot(1))),
    extra("many channels", Builder(2).norm(9).op("silu").op("mul", "channel"), (1, 18, 3, 5)),
]


def before_channels(chain: Chain) -> Chain:
    """Without what goes over channels, which has its own tests."""
    return dataclasses.replace(chain, steps=chain.steps[: last_fused_step(chain)]) if over_channels(chain) else chain


ALL = [
    dataclasses.replace(case, chain=before_channels(case.chain), shape=(min(2, case.shape[0]), *case.shape[1:]))
    for case in CASES + EXTRA
]


def plan_for(chain: Chain, tensors: tuple[Tensor, ...], small_tiles: bool = True) -> Plan:
    with torch.no_grad():
        plan = lower_for_gpu(chain, problem_of([t.detach() for t in tensors]), CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.tile is not None
    tile = SMALL["channels_last" if plan.tile.block_c else "contiguous"] if small_tiles else plan.tile
    return dataclasses.replace(plan, by=tile)


def first_value(plan: Plan, tensors: tuple[Tensor, ...]) -> Tensor:
    producer = plan.chain.producer
    value = tensors[0] if producer is None else reference.convolve(producer, tensors[0], tensors[1], None)
    return value.contiguous(memory_format=memory_format(plan.value.layout, plan.chain.dims))


def moments_of(plan: Plan, value: Tensor, tensors: tuple[Tensor, ...]) -> Moments:
    number = plan.chain.first(Normalize, last_fused_step(plan.chain))
    norm = None if number is None else plan.chain.steps[number - 1]
    if number is None or not isinstance(norm, Normalize) or norm.over == "row":
        return None
    # Where only moments are needed, a plan takes them before the steps that they go through.
    first = dataclasses.replace(plan.passes[0], last=number - 1)
    only = dataclasses.replace(plan, passes=(first, *plan.passes[1:]))

    def stage(value: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        partials = moments_pass(only, value, tensors)
        if norm.over == "batch":
            return combine_batch(norm, plan.value, partials, None)
        return combine_moments(norm, plan.value, partials)

    mean, rstd = run_stage(stage, value, *tensors)
    assert mean is not None
    assert rstd is not None
    return mean, rstd


def gradients(
    plan: Plan, needs: frozenset[int], value: Tensor, moments: Moments, dy: Tensor, tensors: Sequence[Tensor]
) -> Gradients:
    """By the passes of ours."""
    stage = functools.partial(gradient_stage, plan, needs, moments is not None)
    dv0, *found = run_stage(stage, value, dy, *(moments or ()), *tensors)
    assert dv0 is not None
    slots = sorted(needs)
    return dv0, {slot: one for slot, one in zip(slots, found, strict=True) if one is not None}


def gradient_stage(
    plan: Plan, needs: frozenset[int], has_moments: bool, value: Tensor, dy: Tensor, *rest: Tensor
) -> Any:
    moments, tensors = ((rest[0], rest[1]), rest[2:]) if has_moments else (None, rest)
    if row_norm(plan.chain) is None:
        dv0, found = gradient_passes(plan, needs, value, moments, dy, tensors)
    else:
        dv0, found = rows_gradient(plan, needs, value, dy, tensors)
    return dv0, [found.get(slot) for slot in sorted(needs)]


def everything(chain: Chain) -> frozenset[int]:
    return frozenset(pass_slots(chain, last_fused_step(chain)))


def truth(
    chain: Chain, value: Tensor, dy: Tensor, tensors: tuple[Tensor, ...], needs: frozenset[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """By float64 autograd of the reference's steps."""
    leaf = value.detach().double().requires_grad_()
    leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
    has_bias = chain.producer is not None and chain.producer.has_bias
    values: list[Tensor | None] = [leaf + reference.per_channel(leaves[2], chain.dims) if has_bias else leaf]
    for step in chain.steps[: last_fused_step(chain)]:
        values.append(reference.apply(chain, step, values, leaves, keep_dtype=True))
    slots = sorted(needs)
    assert values[-1] is not None
    wanted = [leaf, *(leaves[slot] for slot in slots)]
    found = torch.autograd.grad(values[-1], wanted, dy.double(), allow_unused=True, materialize_grads=True)
    return found[0], dict(zip(slots, found[1:]))


def compared(case: Case, dtype: torch.dtype, layout: Any, nothing: float = 0.0) -> float:
    """The largest error of any gradient, as a part of that gradient's largest element; a chain may have no gradient but
    rounding: what is less than `nothing` of the result's is measured by that."""
    tensors = tensors_for(case.chain, case.shape, dtype, "cpu", 0, "normal", layout)
    if isinstance(case.chain.steps[0], Pointwise):
        tensors[0].mul_(8).round_().div_(8)  # ties with 0 where there is no convolution
    plan = plan_for(case.chain, tensors, small_tiles=dtype == torch.float32)
    value = first_value(plan, tensors)
    dy = torch.randn_like(value, memory_format=torch.contiguous_format)
    needs = everything(case.chain)
    dv0, found = gradients(plan, needs, value, moments_of(plan, value, tensors), dy, tensors)
    assert (dv0.dtype, dv0.shape, dv0.stride()) == (value.dtype, value.shape, value.stride())
    assert set(found) == needs
    assert all((one.dtype, one.shape) == (tensors[slot].dtype, tensors[slot].shape) for slot, one in found.items())
    right_dv0, right = truth(case.chain, value, dy, tensors, needs)
    # What is nothing in truth (a bias before an instance norm) is measured by what it is a sum of.
    least = max(float(right_dv0.abs().max()), 1e-30, nothing * float(dy.abs().max()))
    pairs = [(dv0, right_dv0), *((found[slot], right[slot]) for slot in needs)]
    errors = [float((a.double() - b).abs().max() / max(least, float(b.abs().max()))) for a, b in pairs]
    return float(torch.nan_to_num(torch.tensor(errors), nan=torch.inf).max())


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_gradients_are_autograds(case: Case, layout: str) -> None:
    assert compared(case, torch.float64, layout) < 1e-9
    if layout == "contiguous":  # the accumulator's dtype matters to neither layout more
        assert compared(case, torch.float32, layout) < 2e-5


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_dtypes_may_differ(layout: Any) -> None:
    """Dtypes as under autocast: a convolution in fp16, parameters and what follows the norm in fp32."""
    chain = Builder(2, dataclasses.replace(conv(2, (3, 6)), dtype="float16")).op("relu").norm(2).op("add", "full")
    steps = (*chain.steps, Cast(Value(3), "float32"))
    built = dataclasses.replace(chain.chain(), steps=steps)
    tensors = tensors_for(built, (2, 3, 9, 8), torch.float32, layout=layout)
    plan = plan_for(built, tensors)
    assert (plan.value.dtype, plan.result_dtype) == ("float16", "float32")
    value = first_value(plan, tensors).half()
    dy, needs = torch.randn(value.shape), everything(built)
    dv0, found = gradients(plan, needs, value, moments_of(plan, value, tensors), dy, tensors)
    right_dv0, right = truth(built, value, dy, tensors, needs)
    assert dv0.dtype == torch.float16
    torch.testing.assert_close(dv0.double(), right_dv0, rtol=1e-3, atol=1e-3)
    for slot, one in found.items():
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), right[slot], rtol=1e-5, atol=1e-5)


class Fused(torch.autograd.Function):
    """The forward passes after the convolution, and our own backward."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, value: Tensor, *tensors: Tensor) -> Tensor:
        moments = moments_of(plan, value, tensors)
        ctx.plan, ctx.moments = plan, moments
        ctx.save_for_backward(value, *tensors)

        def stage(value: Tensor, *rest: Tensor) -> Tensor:
            means, given = (None, rest) if moments is None else ((rest[0], rest[1]), rest[2:])
            return finish_pass(plan, value, means, given)

        (result,) = run_stage(stage, value.clone(), *(moments or ()), *tensors)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        value, *tensors = ctx.saved_tensors
        dv0, found = gradients(ctx.plan, everything(ctx.plan.chain), value, ctx.moments, dy, tensors)
        return None, dv0, *(found.get(slot) for slot in range(len(tensors)))


@pytest.mark.parametrize(
    "builder",
    [
        Builder(2, conv(2, (2, 2), 2)).op("silu").norm(1).op("mul", Value(0)).op("add", "full"),
        Builder(2).op("mul", "channel").norm(None).op("gelu", approximate="tanh").op("mul", "channel"),
        Builder(2).op("gelu", approximate="none").op("mul", "full"),
        Builder(2).op("mul", "row").norm(1).op("silu").op("add", "row"),
    ],
    ids=lambda b: str(b.chain()),
)
def test_numerical_differentiation_agrees(builder: Builder) -> None:
    chain = builder.chain()
    shape = (2, 2, 2, 1) if "row" in chain.roles else (1, 2, 3, 2)  # a backward pass for each number
    tensors = tensors_for(chain, shape, torch.float64)
    plan = plan_for(chain, tensors)
    value = first_value(plan, tensors).clone().requires_grad_()
    slots = everything(chain)
    leaves = [t.clone().requires_grad_(slot in slots) for slot, t in enumerate(tensors)]
    assert torch.autograd.gradcheck(lambda *given: Fused.apply(plan, *given), (value, *leaves), nondet_tol=0.0)


def test_what_is_frozen_is_neither_computed_nor_returned() -> None:
    case = BY_NAME["conv norm residual relu"]
    tensors = tensors_for(case.chain, case.shape, torch.float64)
    plan = plan_for(case.chain, tensors)
    value = first_value(plan, tensors)
    moments, dy = moments_of(plan, value, tensors), torch.randn_like(value)
    weight, bias, residual = sorted(everything(case.chain))
    whole = gradients(plan, everything(case.chain), value, moments, dy, tensors)
    for needs in (frozenset[int](), frozenset({weight}), frozenset({bias}), frozenset({residual})):
        dv0, found = gradients(plan, needs, value, moments, dy, tensors)
        assert torch.equal(dv0, whole[0])
        assert set(found) == needs
        assert all(torch.equal(one, whole[1][slot]) for slot, one in found.items())
        stage = functools.partial(gradient_stage, plan, needs, True)
        last = next(
            c
            for c in kernel_calls(traced_calls(stage, value, dy, *moments, *tensors))
            if "NUM_FULL" in dict(c.constants)
        )
        assert dict(last.constants)["NUM_FULL"] == len(needs & {residual})
    chain = BY_NAME["conv per-channel and scalar"].chain
    assert reverse.gradient(chain, 4, frozenset()).returns == (Gradient(Value(0)),)


def test_a_residual_that_no_gradient_depends_on_is_not_read() -> None:
    chain = Builder(2).norm(2).op("add", "full").chain()
    tensors = tensors_for(chain, (2, 4, 5, 6), torch.float64)
    plan = plan_for(chain, tensors)
    value = first_value(plan, tensors)
    moments, dy = moments_of(plan, value, tensors), torch.randn_like(value)
    without = (*tensors[:3], torch.full((), float("nan"), dtype=torch.float64).expand(value.shape))
    dv0, found = gradients(plan, everything(chain), value, moments, dy, without)
    assert torch.equal(found[3], dy)
    torch.testing.assert_close(dv0, truth(chain, value, dy, tensors, everything(chain))[0])


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["square", "residual twice", "clamp_min and leaky_relu", "gelu both ways"])
@pytest.mark.parametrize("where", ["dy", "value"])
def test_nan_is_where_autograd_has_it(name: str, where: str, layout: Any) -> None:
    case = next(case for case in ALL if case.name == name)
    tensors = tensors_for(case.chain, case.shape, torch.float64, layout=layout)
    plan = plan_for(case.chain, tensors)
    value = first_value(plan, tensors)
    dy = torch.randn_like(value)
    place = (1, 2, *[1] * case.chain.dims)
    (dy if where == "dy" else value)[place] = float("nan")
    needs = everything(case.chain)
    dv0, found = gradients(plan, needs, value, moments_of(plan, value, tensors), dy, tensors)
    right_dv0, right = truth(case.chain, value, dy, tensors, needs)
    assert torch.equal(dv0.isnan(), right_dv0.isnan())
    assert right_dv0.isnan().any()
    assert not right_dv0.isnan().all()
    assert all(torch.equal(found[slot].isnan(), right[slot].isnan()) for slot in needs)


def test_the_same_bits_every_time() -> None:
    case = next(case for case in EXTRA if case.name == "vectors on both sides")
    tensors = tensors_for(case.chain, case.shape, torch.float32)
    plan = plan_for(case.chain, tensors)
    value = first_value(plan, tensors)
    moments, dy = moments_of(plan, value, tensors), torch.randn_like(value)
    needs = everything(case.chain)
    (dv0, found), (dv0_again, again) = (gradients(plan, needs, value, moments, dy, tensors) for _ in range(2))
    assert torch.equal(dv0, dv0_again)
    assert all(torch.equal(found[slot], again[slot]) for slot in found)


def test_what_is_not_supported_is_refused_with_its_reason() -> None:
    def reason(builder: Builder) -> str | None:
        chain = builder.chain()
        return reverse.unsupported_gradient(chain, len(chain.steps))

    many = Builder(2, conv(2, (2, 4))).norm(2)
    for _ in range(4):
        many.op("add", "channel")
    assert "more than 6 tensors" in str(reason(many))
    assert "of the value's size" in str(reason(Builder(2).op("add", "full").op("add", "full").op("add", "full")))
    assert "more than one norm" in str(reason(Builder(2).norm(2).norm(2)))
    assert "whole samples" in str(reason(Builder(2).layer_norm(3)))
    assert "reduction" in str(reason(Builder(2).norm(2).reduce("mean", "space")))
    assert reason(Builder(2).norm(2).op("add", "full").op("add", "full")) is None
    assert reverse.unsupported_gradient(BY_NAME["two norms"].chain, 2) is None
    assert reverse.unsupported_gradient(CASES[0].chain, 0) == "no step is fused"
