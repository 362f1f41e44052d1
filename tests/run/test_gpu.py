"""The GPU passes run by Triton's interpreter, against float64: proves indexing and formulas, not precision modes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import BY_NAME, CASES, POOLED, Builder, Case, conv
from machines import SMALL_H200
from postlude import reference
from postlude.chain import Chain, Normalize
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, Spec, problem_of
from postlude.plan.gemm import Gemm
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.passes import Tile
from postlude.run import launch
from postlude.stages import forward
from postlude.stages.cuts import Partials
from postlude.stages.normalize import combine_moments, per_group
from tracing import run_plan, run_stage

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
CARD = SMALL_H200
SMALL = {
    "contiguous": Tile(128, 0, 64, 2),
    "channels_last": Tile(64, 8, 32, 2),
}  # several chunks and tiles on small shapes


def fused(chain: Chain, tensors: list[Tensor], small_tiles: bool = True) -> Tensor:
    with torch.no_grad():
        plan = lower_for_gpu(chain, problem_of(tensors), CARD, even_if_slower=True)
        assert isinstance(plan, Plan), plan
        if isinstance(plan.own, Gemm):  # the interpreter multiplies the padding as well
            plan = dataclasses.replace(plan, own=dataclasses.replace(plan.own, rows=32))
        if small_tiles:
            assert plan.tile is not None
            tile = SMALL["channels_last" if plan.tile.block_c else "contiguous"]
            plan = dataclasses.replace(plan, by=tile)
        return run_plan(plan, tensors)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["61 small", "23 small", "conv norm residual relu", "conv relu mean over space"])
@pytest.mark.usefixtures("poisoned_memory", "library_convolution")
def test_is_right_by_the_rule(name: str, layout: str) -> None:
    case = BY_NAME[name]
    seeds = 5 if layout == "contiguous" else 2  # the same numbers in another order
    points = chain_points(case.chain, case.shape, torch.float32, "cpu", seeds, layout)  # type: ignore[arg-type]
    verdict = verify_chain(fused, case.chain, points)
    assert verdict.right, verdict


@pytest.mark.usefixtures("poisoned_memory")
def test_our_own_convolution_is_right_by_the_rule() -> None:
    case = BY_NAME["61 small"]
    points = chain_points(case.chain, (2, 4, 3, 4, 5), torch.float32, "cpu", seeds=3)
    verdict = verify_chain(fused, case.chain, points)
    assert verdict.right, verdict


GATES = [
    Builder(2, conv(2, (3, 4))).op("mul", "row").norm(2).op("mul", "row").op("relu").chain(),
    Builder(2, conv(2, (3, 4), bias=False)).norm(2).op("mul", "row").op("add", "row").reduce("mean", "sample").chain(),
    Builder(2, conv(2, (3, 4), 2)).op("add", "row").op("relu").chain(),
    Builder(2, conv(2, (3, 4), transposed=True, stride=2)).op("mul", "row").norm(2).op("add", "row").chain(),
]


def gate_error(chain: Chain, layout: str, dtype: torch.dtype = torch.float64) -> float:
    tensors = list(tensors_for(chain, (3, 3, 5, 4), dtype, layout=layout))  # type: ignore[arg-type]
    return float((fused(chain, tensors) - reference.evaluate(chain, tensors, dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("chain", GATES, ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_gates_after_our_own_convolution(chain: Chain, layout: str) -> None:
    assert gate_error(chain, layout) < 1e-11


@pytest.mark.parametrize("right", ["base // a5 * 4", "tl.program_id(0).to(tl.int64) * C"])
def test_another_samples_gate_is_seen_to_fail(right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: every sample reads the first one's numbers."""
    chain, seen = GATES["program_id" in right], []

    def changed(text: str) -> dict[str, Any]:
        seen.append(right in text)
        return compose(text.replace(right, "0"))

    compose = launch.compose
    monkeypatch.setattr(launch, "compose", changed)
    assert gate_error(chain, "contiguous") > 1e-3
    assert any(seen)


@pytest.fixture
def library_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.plan.gpu.own_convolution", lambda *_: "not in this test")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", [*CASES, *POOLED], ids=lambda c: c.name)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_case_in_every_dtype_that_the_interpreter_gets_right(
    case: Case, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every case in fp32; 16 bits and float64 differ in loads and accumulators, which all cases share: in turns.
    other = ((torch.float16, 2e-2), (torch.float64, 1e-10))[[*CASES, *POOLED].index(case) % 2]
    for dtype, tolerance in ((torch.float32, 1e-5), other)[: 2 if layout == "contiguous" else 1]:
        if dtype == torch.float64 or layout == "channels_last":  # and as with more channels than the cases have
            monkeypatch.setattr("postlude.plan.convolve.unfolded_product_for", lambda *_: None)
        tensors = tensors_for(case.chain, case.shape, dtype, "cpu", 0, "normal", layout)
        ours = fused(case.chain, tensors, small_tiles=dtype == torch.float32)
        theirs = reference.evaluate(case.chain, tensors)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if layout == "contiguous":
            assert ours.stride() == theirs.stride()
        truth = reference.evaluate(case.chain, tensors, dtype=torch.float64)
        torch.testing.assert_close(ours.double(), truth, rtol=tolerance, atol=tolerance * float(truth.abs().max()))


def test_a_norm_without_the_second_sum_is_seen_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: combine chunks by averaging their variances, forgetting that their means differ."""
    case = BY_NAME["norm relu without conv"]
    points = list(chain_points(case.chain, case.shape, torch.float32, "cpu"))
    honest = forward.combine_moments

    def forgetful(step: Normalize, value: Spec, partials: Partials) -> tuple[Tensor, Tensor]:
        mean, _ = honest(step, value, partials)
        total = math.prod(value.shape[2:]) * per_group(step, value)
        variance = partials.squares.reshape(len(mean), -1).sum(1) / total
        return mean, torch.rsqrt(variance + 1e-5)

    monkeypatch.setattr(forward, "combine_moments", forgetful)
    assert not verify_chain(fused, case.chain, points).right


def test_groups_whose_parts_agree_have_exactly_their_mean() -> None:
    """An error that all groups make to the same side does not average out in sums over a batch."""
    norm = Builder(2).norm(8).chain().steps[0]
    assert isinstance(norm, Normalize)
    value = Spec((1, 128, 17, 17), "float32", "contiguous")
    means = torch.full((1, 128, 3), 1000.1)
    counts = torch.tensor([[128.0, 128.0, 33.0]])
    mean, _ = run_stage(lambda *given: combine_moments(norm, value, Partials(*given)), means, 0 * means, counts)
    assert mean is not None
    assert torch.equal(mean, means[0, :8, 0])
