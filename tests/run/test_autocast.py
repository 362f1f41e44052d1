"""Products of ours under autocast, by Triton's interpreter: float32 parameters, values and operands of 16 bits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autocasting import autocasted, with_parameters
from cases import Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.plan import Plan, problem_of
from postlude.plan.boxes import Boxes
from postlude.plan.gemm import Arithmetic, Gemm
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.volume import Volume, volume_for
from postlude.run import differentiable
from postlude.run.execute import prepare
from postlude.stages import convolve_boxes
from run.test_gpu import CARD
from tracing import run_plan

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
HALF = torch.float16
BLOCK = Builder(3, conv(3, (16, 16), padding=1)).norm(None).op("prelu", "channel").chain()
GROUPS = Builder(3, conv(3, (16, 16), padding=1)).norm(4).op("add", "full").op("relu").chain()
TURNED = Builder(3, conv(3, (16, 16), transposed=True, bias=False)).op("relu").norm(8).chain()
UP = Builder(2, conv(2, (16, 16), 2, transposed=True, stride=2)).norm(4).op("gelu", approximate="none").chain()
FEW = Builder(2, conv(2, (3, 16))).op("mul", "channel").op("silu").chain()
ROWS = Builder(2, conv(2, (16, 16))).layer_norm(1).op("silu").chain()
CHANNELS = Builder(2, conv(2, (16, 16))).norm(4).reduce("logsumexp", "channels").chain()
# name → chain, input
PATHS: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "boxes": (BLOCK, (2, 16, 3, 4, 8)),
    "boxes, group_norm": (GROUPS, (2, 16, 3, 4, 8)),
    "boxes, transposed": (TURNED, (2, 16, 2, 3, 8)),
    "packed": (BLOCK, (2, 16, 3, 4, 8)),
    "packed, group_norm": (GROUPS, (2, 16, 3, 4, 8)),
    "phases": (UP, (2, 16, 4, 8)),
    "unfolded": (FEW, (2, 3, 6, 7)),
    "rows": (ROWS, (2, 16, 5, 6)),
    "over channels": (CHANNELS, (2, 16, 5, 6)),
}


def tensors_of(name: str, x: torch.dtype, layout: str) -> list[Tensor]:
    """Float32 parameters, and inputs as they reach a layer: of autocast's dtype, or float32 after CUDA's group_norm."""
    chain, shape = PATHS[name]
    made = tensors_for(chain, shape, HALF, "cpu", 0, "normal", layout)  # type: ignore[arg-type]
    tensors = with_parameters(chain, made, torch.float32)
    return [tensors[0].to(x), *tensors[1:]]


def planned(name: str, tensors: list[Tensor], trains: bool = False) -> Plan:
    chain = autocasted(PATHS[name][0], tensors, "cuda", HALF)
    assert isinstance(chain, Chain), chain
    problem = dataclasses.replace(problem_of(tensors), needs_grad=trains)
    plan = lower_for_gpu(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    if name.startswith("boxes"):
        own = small_boxes(chain, tensors)
        return dataclasses.replace(plan, own=own)
    assert isinstance(plan.own, Gemm)  # too narrow for Hopper's boxes
    return dataclasses.replace(plan, own=dataclasses.replace(plan.own, rows=32))


def small_boxes(chain: Chain, tensors: list[Tensor]) -> Boxes:
    """Like `boxes_for`, with boxes so small that there are several."""
    assert chain.producer is not None
    x = problem_of(tensors).x
    packs = x.layout != "channels_last" or x.dtype != "float16"
    return Boxes(Arithmetic("float16"), volume_for(chain.producer, x.shape[2:], 2), 16, packs, 4, 4, 16, 16, 2, 4)


def errors(ours: Tensor, chain: Chain, tensors: list[Tensor]) -> tuple[float, float]:
    """Ours and eager's, against float64."""
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    eager = reference.evaluate(chain, tensors)
    assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
    size = truth.std()
    found = [float(torch.nan_to_num((t.double() - truth).abs().max() / size, nan=torch.inf)) for t in (ours, eager)]
    return found[0], found[1]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("x", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("name", PATHS)
@pytest.mark.usefixtures("poisoned_memory")
def test_is_as_right_as_eager(name: str, x: torch.dtype, layout: str) -> None:
    tensors = tensors_of(name, x, layout)
    plan = planned(name, tensors)
    with torch.no_grad():
        ours, eager = errors(run_plan(plan, tensors), plan.chain, tensors)
    assert ours <= 2 * eager + 1e-3


def test_a_weight_packed_in_its_own_dtype_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: what Triton refused on a card, two dtypes in one product."""
    pack = convolve_boxes.pack_weight

    def faulty(weight: Tensor, volume: Volume, arithmetic: Arithmetic, *rest: Any) -> tuple[Tensor, Tensor]:
        return pack(weight, volume, dataclasses.replace(arithmetic, operands="float32"), *rest)

    tensors = tensors_of("boxes", HALF, "channels_last")
    plan = planned("boxes", tensors)
    run_plan(plan, tensors)
    monkeypatch.setattr(convolve_boxes, "pack_weight", faulty)
    with pytest.raises(Exception, match="dtype"):
        run_plan(plan, tensors)


def gradients(run: Callable[[list[Tensor]], Tensor], tensors: list[Tensor], **how: bool) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = run(leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [*torch.autograd.grad(y, leaves, dy, **how)]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["boxes", "packed, group_norm", "rows"])
@pytest.mark.parametrize("x", [HALF, torch.float32], ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_are_as_right_as_eagers(name: str, x: torch.dtype) -> None:
    """Each in its tensor's own dtype."""
    tensors = tensors_of(name, x, "channels_last")
    plan = planned(name, tensors, trains=True)
    found = gradients(prepare(plan.chain, plan), tensors)
    eager = gradients(lambda ts: reference.evaluate(plan.chain, ts), tensors)
    truth = gradients(lambda ts: reference.evaluate(plan.chain, ts, dtype=torch.float64), tensors)
    for one, theirs, true, tensor in zip(found, eager, truth, tensors, strict=True):
        assert one.dtype == tensor.dtype
        error, own = (float((t.double() - true.double()).norm()) for t in (one, theirs))
        assert error <= 2 * own + 2e-3 * float(true.double().norm()) + 1e-3


def test_a_backward_pass_inside_of_an_autocast_region_is_the_same() -> None:
    """Also where it is differentiated again, operator by operator."""
    chain = Builder(2, conv(2, (3, 4))).norm(2).op("silu").chain()
    tensors = [*tensors_for(chain, (2, 3, 6, 7), torch.float32)]
    problem = dataclasses.replace(problem_of(tensors), needs_grad=True)
    plan = lower_for_gpu(chain, problem, CARD, even_if_slower=True, not_ours="not in this test")
    assert isinstance(plan, Plan), plan
    run = prepare(chain, plan)

    def inside(ts: list[Tensor]) -> Tensor:
        y = run(ts)
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        return y

    for again in (False, True):
        outside = gradients(run, tensors, create_graph=again)
        with contextlib.ExitStack() as stack:
            found = gradients(inside, tensors, create_graph=again)
        for one, other in zip(found, outside, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_backward_pass_that_is_cast_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: autocast left on."""
    monkeypatch.setattr(differentiable, "without_autocast", lambda _: contextlib.nullcontext())
    with pytest.raises(AssertionError):
        test_a_backward_pass_inside_of_an_autocast_region_is_the_same()
