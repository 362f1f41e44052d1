"""Chains whose convolution of few channels is stored: CUDA C++ compiled for the host, Triton by its interpreter."""

from __future__ import annotations

import shutil

import pytest
import torch

from cases import Builder, conv
from kernels.cuda_host.build import HostKernels
from plan.test_lower import problem
from postlude import reference
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.plan import Plan
from postlude.plan.few_channels import StoredFewChannels
from postlude.plan.gpu import lower_for_gpu
from postlude.run import launch
from run.test_few_channels_gradient import HOPPER
from tracing import run_plan

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernel for the host"),
]
SHAPE = (1, 3, 10, 12, 7)
CHAINS: dict[str, Chain] = {
    "alone": Builder(3, conv(3, (3, 5))).chain(),
    "alone, transposed": Builder(3, conv(3, (3, 5), transposed=True, padding=2, bias=False)).chain(),
    "48": Builder(3, conv(3, (3, 5))).op("mul", "channel").op("tanh").chain(),
    "6": Builder(3, conv(3, (3, 5), padding=1)).softmax().chain(),
    "79": Builder(3, conv(3, (3, 5))).op("mul", "channel").norm(None).op("clamp", low=-1.0, high=1.0).chain(),
    "83": Builder(3, conv(3, (3, 6))).norm(2).op("minimum", 0.5).chain(),
    "a pool": Builder(3, conv(3, (3, 5))).op("relu").pool("max", 2).chain(),
    "largest of channels": Builder(3, conv(3, (3, 5))).norm(None).reduce("amax", "channels").chain(),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(lambda: tmp_path_factory.mktemp("cuda"))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.usefixtures("poisoned_memory")
def test_is_right(name: str, built: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cuda_kernel", lambda call, _: built(call))
    monkeypatch.setattr("postlude.plan.few_channels._LEAST_ROUNDS", 1)
    chain = CHAINS[name]
    plan = lower_for_gpu(chain, problem(chain, SHAPE, device="cuda"), HOPPER, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert isinstance(plan.own, StoredFewChannels), plan.reasons
    tensors = tensors_for(chain, SHAPE, torch.float32, family="hierarchical")
    with torch.no_grad():
        found = run_plan(plan, tensors)
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5 * float(truth.abs().max()))
