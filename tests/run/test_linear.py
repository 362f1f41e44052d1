"""Linear layers by Triton's interpreter: the product with its epilogue, passes by rows and by columns, and mutants."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.plan import Plan, problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.linear import LinearGemm
from run.test_gpu import CARD
from tracing import run_plan

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
    "two barriers": (layer(20, 24).norm(1).op("tanh").reduce("max", "channels").op("abs").chain(), (9, 20)),
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
