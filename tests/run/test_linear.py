"""Linear layers by Triton's interpreter: the product with its epilogue, passes by rows and by columns, and mutants."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from postlude import reference
from postlude.chain import Cast, Chain, Pointwise, Scalar, Value, values_of
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.plan.gemm import Arithmetic
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.linear import LinearGemm
from postlude.run.chain_run import Training
from postlude.run.compose import compose
from postlude.stages.linear import pack_rows
from run.test_gpu import CARD
from run.test_training import gradients
from tracing import run_plan, run_stage
from wrong_kernels import replace_text

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("poisoned_memory")]


def layer(inner: int, outer: int, bias: bool = True) -> Builder:
    return Builder(0, conv(0, (inner, outer), bias=bias))


CHAINS: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "pointwise": (layer(36, 20).op("sub", 2.0).op("mul", "channel").op("relu").chain(), (37, 36)),
    "another tensor": (layer(20, 40, bias=False).op("silu").op("add", "full").op("mul", "one").chain(), (5, 20)),
    "batch_norm": (layer(36, 20).op("mul", "channel").batch_norm().op("gelu", approximate="none").chain(), (37, 36)),
    "batch_norm, then rows": (layer(20, 12).batch_norm().op("mul", "one").softmax().chain(), (9, 20)),
    "groups": (layer(20, 24).op("silu").op("add", "channel").norm(4).op("relu").chain(), (9, 20)),
    "groups of odd sizes, then a reduction": (layer(20, 15).norm(3).reduce("min", "channels", True).chain(), (9, 20)),
    "layer_norm": (layer(20, 24).layer_norm().op("mul", "channel").chain(), (9, 20)),
    "a row without affine": (layer(20, 24).layer_norm(affine=False).op("add", "full").chain(), (9, 20)),
    "softmax": (layer(20, 24).op("gelu", approximate="none").softmax().chain(), (9, 20)),
    "two barriers": (layer(20, 24).norm(1).op("silu").reduce("max", "channels").op("abs").chain(), (9, 20)),
    "sum": (layer(20, 24).op("sigmoid").reduce("sum", "sample").op("mul", 0.5).chain(), (9, 20)),
    "mean": (layer(20, 30, bias=False).op("sub", "channel").reduce("mean", "sample", True).chain(), (9, 20)),
    "logsumexp": (layer(20, 30).op("mul", 2.0).reduce("logsumexp", "channels", True).op("mish").chain(), (9, 20)),
}


def planned(chain: Chain, tensors: list[Tensor], cuts: bool = False, ours: bool = True) -> Plan:
    with torch.no_grad():
        not_ours = None if ours else "as asked"
        plan = lower_for_gpu(chain, problem_of(tensors), CARD, even_if_slower=True, not_ours=not_ours)
    assert isinstance(plan, Plan), plan
    assert isinstance(plan.own, LinearGemm) == (ours and tensors[0].dtype.itemsize > 2)
    if isinstance(plan.own, LinearGemm):
        small = dataclasses.replace(plan.own, rows=16, block_c=16, block_k=16)
        plan = dataclasses.replace(plan, own=dataclasses.replace(small, cuts_weight=cuts))
    return plan


def error_of(plan: Plan, tensors: list[Tensor]) -> float:
    truth = reference.evaluate(plan.chain, tensors, dtype=torch.float64)
    ours, theirs = run_plan(plan, [t.clone() for t in tensors]), reference.evaluate(plan.chain, tensors)
    assert (ours.dtype, ours.stride(), ours.shape) == (theirs.dtype, theirs.stride(), theirs.shape)
    return float((ours.double() - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("way", ["packed", "cut", "PyTorch's"])
@pytest.mark.parametrize("name", CHAINS)
def test_values_strides_and_dtypes_are_pytorchs(name: str, way: str) -> None:
    chain, shape = CHAINS[name]
    dtypes = {torch.float32: 2e-6} if way == "cut" else {torch.float32: 2e-6, torch.float64: 1e-12, torch.float16: 1e-2}
    for dtype, tolerance in dtypes.items():
        tensors = list(tensors_for(chain, shape, dtype))
        assert error_of(planned(chain, tensors, way == "cut", way != "PyTorch's"), tensors) < tolerance, dtype


def trained(chain: Chain, tensors: list[Tensor], ours: bool = True, cuts: bool = False) -> Training:
    problem = problem_of(tensors, convolution="auto" if ours else "pytorch")
    plan = lower(chain, dataclasses.replace(problem, device="cuda", needs_grad=True), CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    if isinstance(plan.own, LinearGemm):
        plan = dataclasses.replace(plan, own=dataclasses.replace(plan.own, rows=16, block_c=16, cuts_weight=cuts))
    return Training(plan, chain)


DETACHED = layer(20, 24).op("detach").chain()
SCALED = (Pointwise("mul", (Value(0), Scalar(0.5))), Pointwise("add", (Value(2), Value(1))))
DETACHED = dataclasses.replace(DETACHED, steps=(*DETACHED.steps, *SCALED))


# The products are the same whatever is around them.
TRAINED = [(name, "ours") for name in (*CHAINS, "detached")]
TRAINED += [(name, way) for name in ("pointwise", "batch_norm", "groups") for way in ("cut", "PyTorch's")]


@pytest.mark.parametrize(("name", "way"), TRAINED)
def test_gradients_are_autograds(name: str, way: str) -> None:
    chain, shape = CHAINS.get(name, (DETACHED, (9, 20)))
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        if way == "cut" and dtype == torch.float64:
            continue
        tensors = list(tensors_for(chain, shape, dtype))
        for slot, tensor in enumerate(tensors):
            tensor.requires_grad_(slot not in chain.moved)
        run = trained(chain, tensors, way != "PyTorch's", way == "cut")
        truth = gradients(lambda ts: reference.evaluate(chain, ts, dtype=torch.float64), tensors)
        for ours, true in zip(gradients(run, tensors), truth, strict=True):
            assert ours.shape == true.shape
            torch.testing.assert_close(
                ours.double(), true.double(), rtol=tolerance, atol=tolerance * float(true.abs().max() + 1)
            )


# What is cut in the product is the same whatever follows it.
RULED = [(name, False) for name in ("pointwise", "batch_norm", "groups", "softmax", "logsumexp")] + [("groups", True)]


@pytest.mark.parametrize(("name", "cuts"), RULED)
def test_is_right_by_the_rule(name: str, cuts: bool) -> None:
    """Infinities and NaN among them."""
    chain, shape = CHAINS[name]

    def run(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        return run_plan(planned(chain, list(tensors), cuts), tensors)

    verdict = verify_chain(run, chain, chain_points(chain, shape))
    assert verdict.outcome == "right", verdict


@pytest.mark.parametrize("cuts", [False, True])
def test_infinities_of_either_operand_come_out_as_pytorchs(cuts: bool) -> None:
    chain, shape = layer(36, 20).op("relu").chain(), (37, 36)
    for slot in (0, 1):
        tensors = [t.clone() for t in tensors_for(chain, shape, torch.float32)]
        tensors[slot][3, 5], tensors[slot][7, 9], tensors[slot][7, 11] = float("inf"), float("nan"), -float("inf")
        ours, theirs = run_plan(planned(chain, tensors, cuts), tensors), reference.evaluate(chain, tensors)
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())


def test_an_infinity_times_a_tiny_number_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision that number is zero, which must not be what the infinity is multiplied by."""
    chain = layer(36, 20).op("relu").chain()
    tensors = [t.clone() for t in tensors_for(chain, (37, 36), torch.float32)]
    tensors[0][3, 5], tensors[1][:, 5] = float("inf"), 1e-15
    for cuts in (False, True):
        assert run_plan(planned(chain, tensors, cuts), tensors)[3].isinf().all()
    replace_text(monkeypatch, "linear", "high_plane(b_w, b_scaled, True, tl.float16)", "b_scaled.to(tl.float16)")
    assert run_plan(planned(chain, tensors, cuts=True), tensors)[3].isnan().all()


def test_magnitudes_of_each_row_have_a_scale_of_their_own() -> None:
    chain = layer(64, 20, bias=False).op("mul", 1.0).chain()
    x, weight = tensors_for(chain, (37, 64), torch.float32)
    x, weight = x * torch.logspace(-20, 15, 37)[:, None], weight * torch.logspace(-18, 18, 20)[:, None]
    truth = reference.evaluate(chain, [x, weight], dtype=torch.float64)
    for cuts in (False, True):
        ours = run_plan(planned(chain, [x, weight], cuts), [x, weight]).double()
        assert float(((ours - truth).abs() / truth.abs().amax(1, keepdim=True)).max()) < 5e-6
        assert float(((ours - truth).abs() / truth.abs().amax(0, keepdim=True)).max()) < 5e-6


@pytest.mark.parametrize(
    "arithmetic", [Arithmetic("float16", 2, scaled=True, keeps_infinities=True), Arithmetic("float64")]
)
def test_a_matrix_that_lies_transposed_is_packed_to_the_same_bits(arithmetic: Arithmetic) -> None:
    lying = torch.randn(150, 40, dtype=torch.float64 if arithmetic.is_exact else torch.float32)
    lying = lying * torch.logspace(-12, 12, 40, dtype=lying.dtype)
    lying[3, 5], lying[7, 9] = float("inf"), float("nan")

    def packed(x: Tensor) -> list[Tensor]:
        return [plane for plane in run_stage(lambda x: pack_rows(x, arithmetic), x) if plane is not None]

    turned = run_stage(lambda x: pack_rows(x.t(), arithmetic), lying)
    for ours, same in zip(
        (plane for plane in turned if plane is not None), packed(lying.t().contiguous()), strict=True
    ):
        assert ours.shape == same.shape
        torch.testing.assert_close(ours, same, rtol=0, atol=0, equal_nan=True)


# The chain that tells, the file, what is right and what is not.
MUTANTS = {
    "a row's scale is not undone": (
        "pointwise",
        "linear",
        "acc * tl.load(p_x_unscale",
        "acc + 0.0 * tl.load(p_x_unscale",
    ),
    "no low plane": (
        "pointwise",
        "linear",
        "(b_scaled - b_high.to(tl.float32)).to(tl.float16)",
        "(b_high * 0.0).to(tl.float16)",
    ),
    "the other tile": ("pointwise", "linear", "i_tile = tl.program_id(0) % together // size", "i_tile = 0"),
    "infinities": ("pointwise", "linear", 'tl.where(tl.abs(alone) < float("inf"), acc, alone)', "acc"),
    "the first group's vector": ("groups", "rows", "(first + o_r) % (C // L) * L", "(first + o_r) % (C // L) * 0"),
    "lanes past the end": ("softmax", "rows", "tl.sum(powers, axis=1)", "tl.sum(exp(x - largest), axis=1)"),
    "the largest stays": ("softmax", "rows", "exp(x - largest)", "exp(x)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, shape = CHAINS[MUTANTS[name][0]]
    compose.cache_clear()  # what is composed has the device functions of that moment
    replace_text(monkeypatch, *MUTANTS[name][1:])

    def run(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        return run_plan(planned(chain, list(tensors), cuts=True), tensors)

    verdict = verify_chain(run, chain, chain_points(chain, shape))
    compose.cache_clear()
    assert verdict.outcome == "wrong", verdict


def under_autocast(chain: Chain) -> Chain:
    """The layer in half precision, and fp32 again before the last step, as autocast has it before a norm."""
    producer = dataclasses.replace(chain.convolution, dtype="float16")
    *before, last = chain.steps
    (value,) = values_of(last)
    steps = (*before, Cast(value, "float32"), dataclasses.replace(last, operand=Value(len(chain.steps))))  # type: ignore[call-arg]
    return dataclasses.replace(chain, producer=producer, steps=steps)


CASTED = {
    "softmax": layer(20, 24).op("gelu", approximate="none").softmax(),
    "layer_norm": layer(20, 24).op("tanh").layer_norm(),
    "batch_norm": layer(20, 24).batch_norm(),
}


@pytest.mark.parametrize("name", CASTED)
def test_autocasts_layer_and_what_follows_in_fp32(name: str) -> None:
    chain, shape = under_autocast(CASTED[name].chain()), (9, 20)
    tensors = list(tensors_for(chain, shape, torch.float32))
    with torch.no_grad():
        plan = lower_for_gpu(chain, problem_of(tensors), CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.own is None
    ours, theirs = run_plan(plan, [t.clone() for t in tensors]), reference.evaluate(chain, tensors)
    assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max()))
    for slot, tensor in enumerate(tensors):
        tensor.requires_grad_(slot not in chain.moved)
    run = trained(chain, tensors)
    truth = gradients(lambda ts: reference.evaluate(chain, ts), tensors)
    for ours, true in zip(gradients(run, tensors), truth, strict=True):
        assert ours.dtype == true.dtype
        torch.testing.assert_close(ours, true, rtol=2e-2, atol=2e-2 * float(true.abs().max() + 1))
