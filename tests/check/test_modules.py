"""Candidates that keep the module's contract are accepted, and each way of breaking it is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from check import candidates
from check.candidates import INPUTS, Honest, Model, candidate
from postlude.check.modules import verify_modules
from postlude.check.verdict import Verdict


def verdict_on(module: nn.Module, **settings: Any) -> Verdict:
    torch.manual_seed(0)
    return verify_modules(Model(), module, INPUTS, **settings)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_honest_candidate_is_right(backward: bool) -> None:
    module = Honest()
    before = copy.deepcopy(module.state_dict())
    verdict = verdict_on(module, backward=backward)
    assert verdict.right, verdict
    names = {judged.name for judged in verdict.quantities}
    assert ("gradient of conv.weight" in names) == backward
    assert ("gradient of input[0]" in names) == backward
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (candidates.raises, "the candidate raised ValueError: no kernel for 5 dimensions"),
        (candidates.writes_into_its_input, "changed its inputs"),
        (candidates.writes_into_its_parameters, "changed its parameters: norm.weight"),
        (candidates.answers_in_another_dtype, "dtype torch.float64, PyTorch gives torch.float32"),
        (candidates.answers_in_another_shape, "shape (3, 1), PyTorch gives (3,)"),
        (candidates.remembers_weights_by_version, "rms error"),
        (candidates.remembers_answers_by_address, "rms error"),
        (candidates.answers_in_one_buffer, "earlier result changed"),
        (candidates.answers_mean_of_beta, "rms error"),
        (candidates.answers_zeros, "rms error"),
        (candidates.differs_from_call_to_call, "rms error"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_broken_candidate_is_wrong(forward: Callable[..., Any], reason: str) -> None:
    verdict = verdict_on(candidate(forward))
    assert verdict.outcome == "wrong", verdict
    assert reason in verdict.reasons[0]
    assert "second line" not in str(verdict)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (candidates.forgets_a_gradient, "gradient of norm.bias: missing"),
        (candidates.halves_a_gradient, "gradient of conv.weight: rms"),
    ],
    ids=["missing", "halved"],
)
def test_wrong_gradient_is_found_only_when_asked_for(forward: Callable[..., Any], reason: str) -> None:
    assert verdict_on(candidate(forward)).right
    verdict = verdict_on(candidate(forward), backward=True)
    assert verdict.outcome == "wrong"
    assert reason in verdict.reasons[0]


def test_other_state_keys_are_named() -> None:
    module = candidate(candidates.right)
    module.norm_weight = nn.Parameter(torch.ones(8))  # type: ignore[assignment]
    del module.norm
    verdict = verdict_on(module)
    assert verdict.outcome == "wrong"
    assert "has in addition: norm_weight" in verdict.reasons[0]
    assert "lacks: norm.bias, norm.weight" in verdict.reasons[1]


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(torch.minimum(x, torch.zeros_like(x)), min=0)


class IgnoresItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3, 40))

    def forward(self, x: Tensor) -> Tensor:
        return self.table + 0 * x.mean()


class NotInDouble(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 7) @ torch.ones(7, 9, dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Constant, "nearly constant"),
        (IgnoresItsInput, "the answer for another input"),
        (NotInDouble, "the reference in float64 raised RuntimeError"),
    ],
)
def test_a_problem_that_cannot_tell_says_why(kind: type[nn.Module], reason: str) -> None:
    verdict = verify_modules(kind(), kind(), INPUTS)
    assert verdict.outcome == "cannot tell", verdict
    assert reason in verdict.reasons[0]


class Batch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm3d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).relu()


class ForgetsRunningStatistics(Batch):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.norm.weight, self.norm.bias, training=True).relu()


def test_running_statistics_are_part_of_the_answer_in_training() -> None:
    assert verify_modules(Batch(), Batch(), INPUTS).right
    verdict = verify_modules(Batch(), ForgetsRunningStatistics(), INPUTS)
    assert verdict.outcome == "wrong"
    assert any("buffer norm.running_" in reason for reason in verdict.reasons)
    assert verify_modules(Batch().eval(), Batch().eval(), INPUTS).right
    assert verify_modules(Batch().eval(), ForgetsRunningStatistics().eval(), INPUTS).outcome == "wrong"


class RoundsItsOperands(Model):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight.to(torch.float16).float()
        return self.norm(F.conv3d(x.to(torch.float16).float(), weight, self.conv.bias)).mean((1, 2, 3, 4))


def test_a_mode_allows_its_own_rounding_and_no_more() -> None:
    assert verdict_on(RoundsItsOperands(), precision="fp32").outcome == "wrong"
    assert verdict_on(RoundsItsOperands(), precision="fp16").right
    # fp16 and TF32 keep the same number of bits.
    assert verdict_on(RoundsItsOperands(), precision="tf32").right


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_other_dtypes(dtype: torch.dtype) -> None:
    inputs = (INPUTS[0].to(dtype),)
    verdict = verify_modules(Model().to(dtype), Honest().to(dtype), inputs)
    assert verdict.right, verdict
    wrong = verify_modules(Model().to(dtype), candidate(candidates.answers_mean_of_beta).to(dtype), inputs)
    assert wrong.outcome == "wrong"


class TwoAnswers(Model):
    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        y = self.conv(x)
        return {"norm": self.norm(y), "more": [y.relu()]}


class SwapsTwoChannels(TwoAnswers):
    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        result = super().forward(x)
        return {**result, "more": [result["more"][0].roll(1, dims=1)]}


def test_every_output_of_a_nested_result_is_compared() -> None:
    assert verify_modules(TwoAnswers(), TwoAnswers(), INPUTS, backward=True).right
    verdict = verify_modules(TwoAnswers(), SwapsTwoChannels(), INPUTS)
    assert verdict.outcome == "wrong"
    assert verdict.reasons[0].startswith("output['more'][0]")


def test_random_state_and_caller_inputs_are_left_alone() -> None:
    state = torch.random.get_rng_state()
    before = INPUTS[0].clone()
    seen: list[str] = []
    verify_modules(Model(), Model(), INPUTS, progress=seen.append)
    assert torch.equal(before, INPUTS[0])
    assert len(seen) >= 10
    torch.random.set_rng_state(state)
    verify_modules(Constant(), Constant(), INPUTS)
    assert torch.equal(state, torch.random.get_rng_state())


class WithIndices(Model):
    shift = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = self.norm(self.conv(x)).mean((2, 3, 4))
        return y, y.argmax(1) + self.shift


class WithWrongIndices(WithIndices):
    shift = 1


def test_indices_must_be_equal() -> None:
    assert verify_modules(WithIndices(), WithIndices(), INPUTS, backward=True).right
    verdict = verify_modules(WithIndices(), WithWrongIndices(), INPUTS)
    assert verdict.reasons == ("output[1]: differs from PyTorch's",)


def test_inputs_reach_the_candidate_with_their_strides() -> None:
    strides = set()

    def looks(self: Any, x: Tensor) -> Tensor:
        strides.add(x.stride())
        return candidates.right(self, x)

    x = INPUTS[0].to(memory_format=torch.channels_last_3d)[:, :, ::2].repeat_interleave(2, 2)[:, :, :5]
    assert verify_modules(Model(), candidate(looks), (x,)).right
    assert x.stride() in strides
