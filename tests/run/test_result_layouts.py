"""The layout of a result on a GPU where PyTorch runs a chain's last steps, next to what PyTorch alone returns there.

PyTorch's fake tensors decide about layouts as its operators do on the device that they claim to be on: on CUDA its
group_norm and instance_norm return contiguous values, on a CPU its group_norm keeps channels-last.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import Builder, conv
from machines import H200
from plan.test_lower import problem
from postlude import hardware
from postlude.chain import Chain
from postlude.hardware import Machine
from postlude.plan import Plan, Problem, lower
from postlude.plan.program import Buffer
from postlude.reference import continue_from, evaluate

BATCH_NORM = {"affine": False, "running": False}
SHAPE = (8, 64, 32, 32)
DILATED = conv(2, (64, 64), dilation=2)
CHAINS = {
    "instance_norm relu group_norm": Builder(2).norm(None).op("relu").norm(4),
    "instance_norm relu group_norm silu": Builder(2).norm(None).op("relu").norm(4).op("silu"),
    "instance_norm relu instance_norm": Builder(2).norm(None).op("relu").norm(None),
    "instance_norm relu batch_norm": Builder(2).norm(None).op("relu").batch_norm(**BATCH_NORM),
    "batch_norm relu group_norm": Builder(2).batch_norm(**BATCH_NORM).op("relu").norm(4),
    "batch_norm relu batch_norm": Builder(2).batch_norm(**BATCH_NORM).op("relu").batch_norm(**BATCH_NORM),
    "group_norm pool group_norm": Builder(2).norm(4).pool("max", 2).op("relu").norm(4),
    "conv group_norm relu group_norm": Builder(2, DILATED).norm(4).op("relu").norm(4),
}


def keeping_layout(device: str) -> frozenset[str]:
    """What `hardware.keeping_layout` finds out by running the operators, of operators in 2-D."""
    with FakeTensorMode():
        x = torch.empty(2, 4, 4, 4, device=device).to(memory_format=torch.channels_last)
        results = {
            "group_norm": F.group_norm(x, 2),
            "instance_norm": F.instance_norm(x),
            "batch_norm": F.batch_norm(x, None, None, training=True),
            "layer_norm": F.layer_norm(x, x.shape[-1:]),
            "max_pool2d": F.max_pool2d(x, 2),
            "avg_pool2d": F.avg_pool2d(x, 2),
        }
    return frozenset(name for name, result in results.items() if not result.is_contiguous())


def machine() -> Machine:
    return dataclasses.replace(H200, keeping_layout=keeping_layout("cuda"))


def fakes(given: Problem) -> list[Tensor]:
    """Tensors of a problem that claim to be on a GPU."""
    x, *others = (torch.empty(spec.shape, device="cuda") for spec in given.tensors)
    return [x.to(memory_format=torch.channels_last), *others]


def ours(plan: Plan, chain: Chain, tensors: list[Tensor]) -> Tensor:
    """The result of a plan's program, and of the steps that PyTorch runs after it."""
    result: Buffer = plan.program.result
    value = torch.empty_strided(result.shape, result.strides, device="cuda")
    return continue_from(chain, len(plan.chain.steps), value, tensors)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_a_result_has_the_layout_of_pytorchs_on_a_gpu(name: str, trains: bool) -> None:
    chain = CHAINS[name].chain()
    given = problem(chain, SHAPE, "channels_last", device="cuda", needs_grad=trains, precision="fp32")
    plan = lower(chain, given, machine(), even_if_slower=True)
    assert isinstance(plan, Plan)
    assert plan.value.layout == "channels_last"
    assert plan.passes[-1].last < len(chain.steps)  # PyTorch runs what remains
    with FakeTensorMode():
        tensors = fakes(given)
        assert ours(plan, chain, tensors).stride() == evaluate(chain, tensors).stride()


def test_what_keeps_a_layout_differs_between_devices() -> None:
    assert keeping_layout("cuda") == {"batch_norm", "max_pool2d", "avg_pool2d"}
    assert keeping_layout("cpu") == {"group_norm", "batch_norm", "max_pool2d", "avg_pool2d"}
    assert keeping_layout("cpu") == hardware.keeping_layout("cpu") - {"max_pool3d"}


def test_a_norm_that_kept_its_layout_would_be_seen() -> None:
    """Mutant: planned for a GPU whose norms keep channels-last, as a CPU's do."""
    chain = Builder(2).norm(4).op("relu").chain()
    given = problem(chain, SHAPE, "channels_last", device="cuda", precision="fp32")
    right, wrong = machine(), dataclasses.replace(machine(), keeping_layout=frozenset({"group_norm"}))
    found = [lower(chain, given, one, even_if_slower=True) for one in (right, wrong)]
    with FakeTensorMode():
        tensors = fakes(given)
        theirs = evaluate(chain, tensors).stride()
        same = [isinstance(one, Plan) and ours(one, chain, tensors).stride() == theirs for one in found]
    assert same == [True, False]
