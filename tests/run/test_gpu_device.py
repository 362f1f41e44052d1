"""The GPU passes on a real card: every case in every dtype by the rule, launches counted, graphs captured."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

import postlude
from cases import BY_NAME, CASES, POOLED, Case
from postlude import hardware, reference
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.run.execute import execute

pytestmark = pytest.mark.gpu
ALONE = BY_NAME["norm relu without conv"]
LONG = dataclasses.replace(ALONE, name="long rows", shape=(2, 6, 20, 20, 20))  # the other cases' are short
TOO_FLAT = ("conv tanh norm affine words pool", torch.bfloat16)  # the mean of each channel is as near
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def fused(chain: Chain, tensors: list[Tensor]) -> Tensor:
    with torch.no_grad():
        plan = lower(chain, problem_of(tensors), hardware.machine_for("cuda"), even_if_slower=True)
        assert isinstance(plan, Plan), plan
        return execute(chain, plan, tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", [*CASES, *POOLED, LONG], ids=lambda c: c.name)
def test_is_right_by_the_rule(case: Case, layout: str, dtype: torch.dtype) -> None:
    points = chain_points(case.chain, case.shape, dtype, "cuda", layout=layout)
    verdict = verify_chain(fused, case.chain, points)
    is_flat = (case.name, dtype) == TOO_FLAT
    assert verdict.right or (is_flat and verdict.outcome == "cannot tell"), verdict


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", [*CASES, *POOLED], ids=lambda c: c.name)
def test_strides_are_pytorchs_and_bits_are_the_same_every_time(case: Case, layout: str) -> None:
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cuda", 0, "normal", layout)
    ours, theirs = fused(case.chain, tensors), reference.evaluate(case.chain, tensors)
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    assert torch.equal(ours, fused(case.chain, tensors))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11, whatever is asked for
@pytest.mark.parametrize("case", [ALONE, LONG], ids=lambda c: c.name)
def test_three_launches_follow_the_convolution(case: Case) -> None:
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cuda", 0, "normal", "contiguous")
    fused(case.chain, tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fused(case.chain, tensors)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "kernel" in event.key]
    assert sorted(kernels) == ["combine_moments_kernel", "finish_kernel", "moments_kernel"]


def test_runs_inside_a_cuda_graph() -> None:
    case = BY_NAME["conv instance_norm leaky_relu"]
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cuda", 0, "normal", "contiguous")
    expected = fused(case.chain, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fused(case.chain, tensors)
    result.zero_()
    graph.replay()
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_whole_model_is_optimized_and_verified(autocast: bool) -> None:
    layers = [nn.Conv3d(4, 16, 3, padding=1), nn.InstanceNorm3d(16, affine=True), nn.LeakyReLU(0.01)]
    layers += [nn.Conv3d(16, 16, 3, padding=1), nn.ReLU(), nn.GroupNorm(4, 16)]
    model = nn.Sequential(*layers).cuda().eval()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 4, 64, 64, 64, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16, enabled=autocast):
        result = postlude.optimize(model, x)
        assert result.verdict is not None
        assert result.verdict.right, result.verdict
        expected = plain(x)
        assert model(x).dtype == expected.dtype
        torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=2e-2)
    assert all(isinstance(site.outcome, Plan) for site in result.sites)
