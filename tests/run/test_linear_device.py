"""Linear layers on a real card: every chain by the rule, full sizes in fp32 no further off than PyTorch's, training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from postlude import hardware, reference
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.plan.linear import LinearGemm
from postlude.run.chain_run import Inference
from postlude.run.execute import prepare

pytestmark = pytest.mark.gpu


def layer(inner: int, outer: int, bias: bool = True) -> Builder:
    return Builder(0, conv(0, (inner, outer), bias=bias))


# Odd sizes, several tiles.
CHAINS: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "pointwise": (layer(180, 200).op("sub", 2.0).op("mul", "channel").op("relu").chain(), (301, 180)),
    "another tensor": (layer(100, 328, bias=False).op("silu").op("add", "full").op("mul", "one").chain(), (67, 100)),
    "batch_norm": (
        layer(180, 200).op("mul", "channel").batch_norm().op("gelu", approximate="none").chain(),
        (301, 180),
    ),
    "batch_norm, then rows": (layer(96, 72).batch_norm().op("mul", "one").softmax().chain(), (190, 96)),
    "groups": (layer(100, 192).op("silu").op("add", "channel").norm(8).op("relu").chain(), (67, 100)),
    "odd groups, then a reduction": (layer(100, 195).norm(13).reduce("min", "channels", True).chain(), (67, 100)),
    "layer_norm": (layer(100, 300).layer_norm().op("mul", "channel").chain(), (67, 100)),
    "softmax": (layer(100, 300).op("gelu", approximate="none").softmax().chain(), (67, 100)),
    "two barriers": (layer(100, 300).norm(1).op("silu").reduce("max", "channels").op("abs").chain(), (67, 100)),
    "sum": (layer(100, 300).op("tanh").reduce("sum", "sample").op("mul", 0.5).chain(), (67, 100)),
    "logsumexp": (layer(100, 300).op("mul", 2.0).reduce("logsumexp", "channels", True).op("mish").chain(), (67, 100)),
}


def planned(chain: Chain, tensors: Sequence[Tensor], precision: str, cuts: bool = False) -> Plan:
    problem = dataclasses.replace(problem_of(tensors, precision), needs_grad=False)
    plan = lower(chain, problem, hardware.machine_for("cuda"), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    if cuts:
        assert isinstance(plan.own, LinearGemm)
    if isinstance(plan.own, LinearGemm):
        plan = dataclasses.replace(plan, own=dataclasses.replace(plan.own, cuts_weight=cuts))
    return plan


@pytest.mark.parametrize("way", ["packed fp32", "cut fp32", "packed tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CHAINS)
def test_is_right_by_the_rule(name: str, way: str) -> None:
    chain, shape = CHAINS[name]
    precision = way.split()[-1] if " " in way else "auto"
    dtype = torch.float32 if " " in way else getattr(torch, way)

    def run(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        return Inference(planned(chain, tensors, precision, way == "cut fp32"), chain)(tensors)

    verdict = verify_chain(run, chain, chain_points(chain, shape, dtype, "cuda"), precision)
    assert verdict.outcome == "right", verdict


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("shape", [(1024, 8192, 8192), (4096, 4096, 4096), (128, 16384, 16384)])
def test_is_no_further_off_than_pytorchs_product_at_full_size(shape: tuple[int, int, int], cuts: bool) -> None:
    rows, inner, outer = shape
    chain = layer(inner, outer).op("relu").chain()
    tensors = tensors_for(chain, (rows, inner), torch.float32, "cuda")
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    with torch.no_grad():
        ours = prepare(chain, planned(chain, tensors, "fp32", cuts))(tensors)
        theirs = reference.evaluate(chain, tensors)
    (off, worst), (known, known_worst) = (
        (float((y - truth).square().mean().sqrt()), float((y - truth).abs().max())) for y in (ours, theirs)
    )
    assert off <= 1.05 * known
    assert worst <= 1.5 * known_worst


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_are_right_by_the_rule(name: str) -> None:
    chain, shape = CHAINS[name]

    def run(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        problem = problem_of(tensors, "fp32")
        plan = lower(chain, problem, hardware.machine_for("cuda"), even_if_slower=True)
        assert isinstance(plan, Plan), plan
        return prepare(chain, plan)(tensors)

    needs = tuple(slot not in chain.moved for slot in range(len(chain.roles)))
    points = chain_points(chain, shape, torch.float32, "cuda")
    verdict = verify_chain(run, chain, points, "fp32", backward=needs)
    assert verdict.outcome == "right", verdict


def test_the_switch_of_matrix_products_is_followed() -> None:
    chain = layer(4096, 4096).op("relu").op("mul", 2.0).chain()
    tensors = tensors_for(chain, (4096, 4096), torch.float32, "cuda")
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for switch, is_ours in (("ieee", True), ("tf32", False)):
            matmul.fp32_precision = switch
            plan = lower(chain, problem_of(tensors), hardware.machine_for("cuda"))
            assert (isinstance(plan, Plan) and plan.own is not None) == is_ours
    finally:
        matmul.fp32_precision = before
