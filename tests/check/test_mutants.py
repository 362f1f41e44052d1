"""The verifier rejects every known mistake and accepts honest implementations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import mutants
from mutants import CHAIN_23, CHAIN_61, HONEST, INPUT_SHAPE, MUTANTS, Implementation, Mutant
from postlude.chain import Chain
from postlude.check.points import ChainPoint, chain_points, tensors_for
from postlude.check.verdict import Verdict
from postlude.check.verify import verify_chain


def verdict_on(run: Implementation, chain: Chain, dtype: torch.dtype = torch.float32) -> Verdict:
    def call(_: Chain, tensors: Sequence[Tensor]) -> Tensor:
        return run(tensors)

    return verify_chain(call, chain, chain_points(chain, INPUT_SHAPE, dtype))


def test_every_mistake_has_a_mutant() -> None:
    assert {mutant.mistake for mutant in MUTANTS} == set(range(1, 12))


CASES = [
    pytest.param(mutant, dtype, id=f"{mutant.name}-{word}")
    for mutant in MUTANTS
    for word, dtype in (("fp32", torch.float32), ("fp16", torch.float16))
    if mutant.mistake != 9 or dtype == torch.float32  # a mistake of fp32
]


@pytest.mark.parametrize(("mutant", "dtype"), CASES)
def test_mutant_is_rejected(mutant: Mutant, dtype: torch.dtype) -> None:
    # Those that keep a state start afresh.
    fresh = (
        type(mutant.run)() if isinstance(mutant.run, (mutants.SumIntoDirtyBuffer, mutants.LostUpdates)) else mutant.run
    )
    verdict = verdict_on(fresh, mutant.chain, dtype)
    assert verdict.outcome == "wrong", verdict
    assert verdict.reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("chain", "run"), HONEST, ids=["61", "23"])
def test_honest_implementation_is_accepted(chain: Chain, run: Implementation, dtype: torch.dtype) -> None:
    verdict = verdict_on(run, chain, dtype)
    assert verdict.right, verdict


@pytest.mark.parametrize(("chain", "run"), HONEST, ids=["61", "23"])
def test_honest_gradients_are_accepted_and_a_lost_one_is_not(chain: Chain, run: Implementation) -> None:
    def gradients_of(call: Implementation) -> Verdict:
        points = chain_points(chain, INPUT_SHAPE)
        return verify_chain(lambda _, tensors: call(tensors), chain, points, backward=True)

    honest = gradients_of(run)
    assert honest.right, honest
    assert {judged.name for judged in honest.quantities} >= {"output", "gradient of slot 0 (input)"}
    scaled = gradients_of(lambda tensors: run([*tensors[:-2], _gradient_scaled(tensors[-2]), tensors[-1]]))
    assert scaled.outcome == "wrong"
    assert "gradient of slot" in scaled.reasons[0]
    lost = gradients_of(lambda tensors: run([*tensors[:-2], tensors[-2].detach(), tensors[-1]]))
    assert lost.outcome == "wrong"
    assert "missing" in lost.reasons[0]


def _gradient_scaled(tensor: Tensor) -> Tensor:
    """The same values, with a gradient that is 1 % too large."""
    return tensor.detach() * (1 - 1.01) + tensor * 1.01 if tensor.requires_grad else tensor


def test_shape_is_the_reason_for_a_wrong_size() -> None:
    verdict = verdict_on(mutants.output_as_large_as_input, CHAIN_61)
    assert "shape (3, 8, 5, 6, 7)" in verdict.reasons[0]


def test_only_the_nan_point_sees_the_relu_that_drops_nan() -> None:
    points = list(chain_points(CHAIN_61, INPUT_SHAPE))

    def call(_: Chain, tensors: Sequence[Tensor]) -> Tensor:
        return mutants.relu_drops_nan(tensors)

    assert verify_chain(call, CHAIN_61, points, nonfinite=False).right
    assert "NaN" in verify_chain(call, CHAIN_61, points).reasons[0]


def test_only_the_large_offset_sees_the_cancellation() -> None:
    def call(_: Chain, tensors: Sequence[Tensor]) -> Tensor:
        return mutants.squares_minus_square(tensors)

    points = list(chain_points(CHAIN_23, INPUT_SHAPE))
    verdict = verify_chain(call, CHAIN_23, points)
    assert "large offset" in verdict.reasons[0]
    for family in ("uniform", "hierarchical"):
        plain = [
            ChainPoint(tensors_for(CHAIN_23, INPUT_SHAPE, torch.float32, seed=seed, family=family), family)  # type: ignore[arg-type]
            for seed in range(5)
        ]
        assert verify_chain(call, CHAIN_23, plain).right


def test_default_parameters_cannot_tell_mean_of_beta_from_the_chain() -> None:
    """γ = 1 and β = 0 make chain 23 nothing but rounding noise: the verifier says so instead of guessing."""

    def plain(seed: int) -> ChainPoint:
        x, weight, bias, gamma, beta = tensors_for(CHAIN_23, INPUT_SHAPE, torch.float32, seed=seed)
        return ChainPoint((x, weight, bias, torch.ones_like(gamma), torch.zeros_like(beta)))

    verdict = verify_chain(
        lambda _, tensors: mutants.mean_of_beta(tensors),
        CHAIN_23,
        [plain(s) for s in range(6)],
        nonfinite=False,
    )
    assert verdict.outcome == "cannot tell", verdict
    assert "β in place of the norm" in verdict.quantities[0].passing_nulls
