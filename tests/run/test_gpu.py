"""The GPU passes run by Triton's interpreter, against float64: proves indexing and formulas, not precision modes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cases import BY_NAME, CASES, Case
from postlude import reference
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.hardware import Machine
from postlude.plan import Plan, problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.types import Tile
from postlude.run import gpu

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
CARD = Machine("cuda", 4, 50 << 20, True)
SMALL = {"contiguous": Tile(128, 0, 2), "channels_last": Tile(64, 8, 2)}  # several chunks and tiles on small shapes


def fused(chain: Chain, tensors: list[Tensor], small_tiles: bool = True) -> Tensor:
    with torch.no_grad():
        plan = lower_for_gpu(chain, problem_of(tensors), CARD, even_if_slower=True)
        assert isinstance(plan, Plan), plan
        if small_tiles:
            assert plan.tile is not None
            tile = SMALL["channels_last" if plan.tile.block_c else "contiguous"]
            plan = dataclasses.replace(plan, tile=tile)
        return gpu.execute(plan, tensors)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["61 small", "23 small", "conv norm residual relu", "conv relu mean over space"])
@pytest.mark.usefixtures("poisoned_memory")
def test_is_right_by_the_rule(name: str, layout: str) -> None:
    case = BY_NAME[name]
    points = chain_points(case.chain, case.shape, torch.float32, "cpu", layout=layout)
    verdict = verify_chain(fused, case.chain, points)
    assert verdict.right, verdict


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_case_in_every_dtype_that_the_interpreter_gets_right(case: Case, layout: str) -> None:
    for dtype, tolerance in ((torch.float16, 2e-2), (torch.float32, 1e-5), (torch.float64, 1e-10)):
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
    honest = gpu._group_moments

    def forgetful(plan: Plan, tile: Tile, value: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        mean, _ = honest(plan, tile, value, *rest)  # type: ignore[arg-type]
        _, squares, _ = gpu._partial_moments(plan, tile, value, rest[0], rest[1])  # type: ignore[arg-type]
        variance = squares.reshape(len(mean), -1).sum(1) / float(value.numel() / len(mean))
        return mean, torch.rsqrt(variance + 1e-5)

    monkeypatch.setattr(gpu, "_group_moments", forgetful)
    assert not verify_chain(fused, case.chain, points).right
