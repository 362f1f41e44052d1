"""The error rule accepts PyTorch's own error and rejects what is beyond it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from postlude.chain import Chain
from postlude.check import budget, chain_points, verify_chain
from postlude.check import deviations as deviations_module
from postlude.check.budget import MIN_POINTS, Measured, judge
from postlude.check.deviations import MismatchError, deviation, deviations, scale_of
from postlude.check.nulls import null_candidates
from postlude.check.verdict import Errors, Judged, Verdict, combine, conclude
from postlude.reference import evaluate

EXACT = deviation(torch.zeros(1), torch.zeros(1, dtype=torch.float64))


def point(truth: Tensor, result: Tensor, own: Tensor, floor: float = 0.0) -> Measured:
    nulls = {name: deviation(null, truth).errors for name, null in null_candidates(truth).items()}
    scale = scale_of(truth, torch.float32)
    return Measured(scale, deviation(result, truth), deviation(own, truth), EXACT, nulls, floor)


def points_with(factor: float, noise: float = 1e-5, count: int = MIN_POINTS, offset: float = 0.0) -> list[Measured]:
    """Points where PyTorch is off by `noise` of the spread and the result by `factor` times that."""
    made = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        truth = torch.randn(4, 8, 9, generator=generator, dtype=torch.float64) + offset
        error = torch.randn(4, 8, 9, generator=generator, dtype=torch.float64) * noise
        made.append(point(truth, truth + factor * error, truth + error))
    return made


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 1.9])
def test_as_good_as_pytorch_is_right(factor: float) -> None:
    assert judge("output", points_with(factor)).outcome == "right"


def test_three_times_the_error_is_wrong() -> None:
    judged = judge("output", points_with(3.0))
    assert judged.outcome == "wrong"
    assert "rms error" in judged.reasons[0]


def test_one_element_far_off_is_wrong_by_worst_alone() -> None:
    made = points_with(1.0)
    truth = torch.randn(4, 8, 9, dtype=torch.float64)
    bad = truth.clone()
    bad[0, 0, 0] += 4e-4  # 40 times PyTorch's error, at one of 288 places of one point of five
    made[0] = point(truth, bad, truth + 1e-5)
    judged = judge("output", made)
    assert [("worst" in reason, "rms" in reason) for reason in judged.reasons] == [(True, False)]


def faint_point(error: float) -> Measured:
    """A truth that is nothing, as of a mean of β = 0, where PyTorch is off by rounding."""
    truth = torch.randn(4, 8, 9, dtype=torch.float64) * 1e-18
    return point(truth, truth + error, truth + 1e-9)


def test_a_truth_that_pytorch_cannot_tell_from_zero_is_measured_by_the_others() -> None:
    """By its own spread PyTorch's error would be 1e9 spreads, a budget that accepts everything."""
    judged = judge("output", [faint_point(1e-9), *points_with(1.0)])
    assert (judged.outcome, judged.passing_nulls) == ("right", ())
    assert judged.budget is not None
    assert judged.budget.rms < 1e-4
    assert judge("output", [faint_point(1e-3), *points_with(1.0)]).outcome == "wrong"
    assert judge("output", [faint_point(0.0) for _ in range(MIN_POINTS)]).outcome == "cannot tell"


def test_a_faint_point_with_its_own_spread_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant."""
    monkeypatch.setattr(budget, "_shares_spread", lambda _: False)
    with pytest.raises(AssertionError):
        test_a_truth_that_pytorch_cannot_tell_from_zero_is_measured_by_the_others()


def test_slack_widens_the_budget() -> None:
    assert judge("output", points_with(3.0), slack=4.0).outcome == "right"
    assert judge("output", points_with(12.0), slack=4.0).outcome == "wrong"


def test_four_points_are_too_few() -> None:
    judged = judge("output", points_with(1.0, count=MIN_POINTS - 1))
    assert judged.outcome == "cannot tell"
    assert "4 usable points" in judged.reasons[0]


def test_ulp_of_the_output_is_allowed_where_pytorch_is_exact() -> None:
    truth = torch.randn(4, 8, 9, dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    near, far = truth * (1 + 2 * eps), truth * (1 + 40 * eps)
    assert judge("output", [point(truth, near, truth)] * MIN_POINTS).outcome == "right"
    assert judge("output", [point(truth, far, truth)] * MIN_POINTS).outcome == "wrong"


def test_ulp_is_that_of_the_dtype_at_the_magnitude() -> None:
    truth = torch.tensor([1.0, 1.5, 1.99, -8.0, 0.25], dtype=torch.float64)
    scale = scale_of(truth, torch.float32)
    expected = [2.0**-23, 2.0**-23, 2.0**-23, 2.0**-20, 2.0**-25]
    assert scale.ulp.worst == 2.0**-20
    assert scale.ulp.rms == pytest.approx(math.sqrt(sum(ulp**2 for ulp in expected) / 5))
    assert scale.spread == pytest.approx(float(truth.std(correction=0)))


def test_strict_rule_needs_allclose_where_pytorch_passes() -> None:
    truth = torch.randn(4, 8, 9, dtype=torch.float64)
    # Off by 1.5e-5 at one place: within four times PyTorch's worst, but not allclose.
    own, result = truth + 0.45e-5, truth + 0.4e-5
    result[0, 0, 0] = 1e-3
    truth[0, 0, 0] = 1e-3 - 1.5e-5
    own[0, 0, 0] = truth[0, 0, 0] + 0.45e-5
    made = [point(truth, result, own)] * MIN_POINTS
    assert judge("output", made).outcome == "right"
    strict = judge("output", made, strict=True)
    assert strict.outcome == "wrong"
    assert "allclose" in strict.reasons[0]
    # Where PyTorch itself does not pass, the rule asks for nothing.
    assert judge("output", [point(truth, result, truth + 2e-5)] * MIN_POINTS, strict=True).outcome == "right"
    # Nor where it passes by a little: which of two honest results does so is luck.
    assert judge("output", [point(truth, result, truth + 0.9e-5)] * MIN_POINTS, strict=True).outcome == "right"


@pytest.mark.parametrize(("true", "ours"), [(math.nan, 0.0), (0.0, math.nan), (math.inf, -math.inf), (1.0, math.inf)])
def test_nonfinite_values_must_be_where_the_truth_has_them(true: float, ours: float) -> None:
    truth = torch.randn(100, dtype=torch.float64)
    result = truth.clone()
    truth[7], result[7] = true, ours
    assert deviation(result, truth).errors == Errors(math.inf, math.inf)
    assert judge("output", [point(truth, result, truth)] * MIN_POINTS).outcome == "wrong"
    assert deviation(truth, truth).errors == Errors(0.0, 0.0)
    assert judge("output", [point(truth, truth, truth)] * MIN_POINTS).outcome == "right"


def test_results_measured_together_are_measured_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(deviations_module.BLOCK, "cpu", 64)  # several blocks, the last one partial
    truth = torch.randn(7, 31, dtype=torch.float64)
    results = [truth.clone(), truth + 1e-3 * torch.randn_like(truth), truth.float(), torch.zeros_like(truth)]
    results[0][6, 30] = math.nan  # only one of them, in the last block
    found = deviations(results, truth)
    error = (results[1] - truth).abs()
    assert found[1].errors.rms == pytest.approx(float(error.square().mean().sqrt()), rel=1e-12)
    assert found[1].errors.worst == float(error.max())
    assert found[1].nearness == pytest.approx(float((error / (1e-5 + 1e-5 * truth.abs())).max()), rel=1e-12)
    assert found[0].errors == Errors(math.inf, math.inf)
    assert found[2].allclose
    assert not found[3].allclose
    one_by_one = [deviation(result, truth) for result in results]
    assert [one.errors.worst for one in found] == [one.errors.worst for one in one_by_one]
    assert [one.errors.rms for one in found] == pytest.approx([one.errors.rms for one in one_by_one], rel=1e-12)
    truth[0, 0] = math.nan  # then every result is wrong here, and one with the same NaN is not
    results[1][0, 0] = math.nan
    assert [math.isfinite(one.errors.worst) for one in deviations(results, truth)] == [False, True, False, False]


def test_another_shape_is_refused_in_a_sentence() -> None:
    with pytest.raises(MismatchError, match=r"shape \(2, 3\), it should be \(3, 2\)"):
        deviation(torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_a_nearly_constant_truth_is_refused(offset: float) -> None:
    truth = torch.full((4, 8, 9), offset, dtype=torch.float64)
    truth += offset * 1e-9 * torch.randn(4, 8, 9, dtype=torch.float64)
    judged = judge("output", [point(truth, truth, truth)] * MIN_POINTS)
    assert judged.outcome == "cannot tell"
    assert "nearly constant" in judged.reasons[0]
    assert judged.refused == MIN_POINTS


def test_a_budget_that_accepts_a_null_cannot_tell() -> None:
    judged = judge("output", points_with(1.0, noise=0.8))
    assert judged.outcome == "cannot tell"
    assert "the mean of the truth" in judged.passing_nulls


def test_pytorch_not_finite_cannot_tell() -> None:
    truth = torch.randn(100, dtype=torch.float64)
    own = truth.clone()
    own[3] = math.inf
    assert judge("output", [point(truth, truth, own)] * MIN_POINTS).outcome == "cannot tell"


def test_single_numbers_share_the_spread_of_all_points() -> None:
    def made(error: float) -> list[Measured]:
        truths = [torch.tensor([float(value)], dtype=torch.float64) for value in range(1, 6)]
        return [point(truth, truth + error, truth + 1e-5) for truth in truths]

    assert judge("output", made(1e-5)).outcome == "right"
    assert judge("output", made(1e-3)).outcome == "wrong"


def test_a_cancelled_gradient_is_judged_by_absolute_error() -> None:
    def made(error: float, floor: float) -> list[Measured]:
        noise = [torch.randn(50, generator=torch.Generator().manual_seed(seed)).double() for seed in range(5)]
        # In truth zero but for float64's rounding; PyTorch gives rounding noise of its own.
        return [point(1e-16 * n, error * n, 1e-7 * n.flip(0), floor) for n in noise]

    assert judge("gradient", made(1e-7, floor=0.0)).outcome == "cannot tell"
    assert judge("gradient", made(1e-7, floor=1e-2)).outcome == "right"
    assert judge("gradient", made(1e-5, floor=1e-2)).outcome == "wrong"


def test_verdict_prints_one_line_and_is_json() -> None:
    right = conclude("fp32", (), [judge("output", points_with(1.0))])
    assert right.right
    assert "\n" not in str(right)
    assert str(right).startswith("right in fp32: error 1")
    numbers = json.loads(json.dumps(right.as_dict(), allow_nan=False))
    assert numbers["quantities"][0]["budget"]["rms"] == right.quantities[0].budget.rms  # type: ignore[union-attr]
    infinite = Verdict("wrong", ("x",), "fp32", (Judged("output", "wrong", (), Errors(math.inf, math.nan)),))
    assert json.dumps(infinite.as_dict(), allow_nan=False)


def test_conclusion_prefers_wrong_to_doubt_to_right() -> None:
    right, wrong, doubt = (Judged(name, name, (name,)) for name in ("right", "wrong", "cannot tell"))  # type: ignore[arg-type]
    assert conclude("", (), [right, doubt, wrong]).outcome == "wrong"
    assert conclude("", (), [right, doubt]).outcome == "cannot tell"
    assert conclude("", (), [right], [doubt]).outcome == "right"
    assert conclude("", (), [right], [wrong]).outcome == "wrong"
    assert conclude("", ["a finding"], [right]).reasons == ("a finding",)
    assert conclude("", (), []).outcome == "cannot tell"


def test_combined_verdict_is_the_worst_part() -> None:
    right, wrong = Verdict("right"), Verdict("wrong", ("why",))
    assert combine([]) is None
    assert combine([right, right]) == right
    both = combine([right, wrong])
    assert both is not None
    assert (both.outcome, both.reasons) == ("wrong", ("why",))


@pytest.mark.parametrize(("among", "outcome"), [("none", "wrong"), ("as exact", "wrong"), ("as inexact", "right")])
def test_pytorchs_error_among_other_samples_counts(among: str, outcome: str) -> None:
    """A candidate with an error that PyTorch has only in a larger batch."""
    chain, shape = Builder(2, conv(2, (3, 4))).op("mul", 2.0).chain(), (1, 3, 12, 12)

    def inexact(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        return evaluate(chain, tensors) * (1 + 2**-19)

    ways = {"none": None, "as exact": lambda chain, tensors: evaluate(chain, tensors), "as inexact": inexact}
    verdict = verify_chain(inexact, chain, chain_points(chain, shape), among=ways[among])
    assert verdict.outcome == outcome, verdict
