"""Points that cannot tell are replaced, time is kept, layouts and modes are tried, and what was left out is said."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from check.candidates import INPUTS, Honest, Model
from postlude.check.exam import Exam, Rules, examine
from postlude.check.exam.cases import GIVEN, REQUIRED
from postlude.check.exam.nonfinite import lost_or_spread
from postlude.check.exam.shapes import DECLARED, GAPS, ODD, ONE
from postlude.check.modules import verify_modules
from postlude.check.sides import InProcess


def exam_of(model: nn.Module, inputs: tuple[Any, ...] = INPUTS, **rules: Any) -> Exam:
    return Exam(model, inputs, Rules(**rules))


def test_the_seed_decides_everything_and_another_one_changes_everything() -> None:
    one, same, other = (exam_of(Model(), seed=seed) for seed in (3, 3, 4))
    for case, again, different in zip(one.cases, same.cases, other.cases, strict=True):
        questions = [exam.sheet(c).question for exam, c in ((one, case), (same, again), (other, different))]
        states = [question.state["conv.weight"] for question in questions]
        assert torch.equal(states[0], states[1])
        assert not torch.equal(states[0], states[2])
        if case.family not in (GIVEN, "NaN"):
            assert torch.equal(questions[0].inputs[0], questions[1].inputs[0])
            assert not torch.equal(questions[0].inputs[0], questions[2].inputs[0])


def test_states_and_inputs_change_one_at_a_time() -> None:
    exam = exam_of(Model())
    first, second, third = (exam.sheet(case).question for case in exam.cases[:3])
    assert torch.equal(first.inputs[0], second.inputs[0])
    assert not torch.equal(first.state["norm.bias"], second.state["norm.bias"])
    assert torch.equal(second.state["norm.bias"], third.state["norm.bias"])
    assert not torch.equal(second.inputs[0], third.inputs[0])


def test_the_candidate_answers_before_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    exam, order = exam_of(Model()), []
    known = exam.truths.known
    monkeypatch.setattr(exam.truths, "known", lambda *args: order.append("reference") or known(*args))

    class Noting(InProcess):
        def ask(self, *args: Any, **options: Any) -> Any:
            order.append("candidate")
            return super().ask(*args, **options)

    assert examine(exam, Noting(Model())).right
    assert order[:3] == ["candidate", "candidate", "reference"]  # asked twice at the first point
    assert all(before == "candidate" for before, one in pairwise(order) if one == "reference")


def test_the_time_budget_leaves_points_out_and_says_so() -> None:
    verdict = verify_modules(Model(), Honest(), INPUTS, seconds=0.0)
    assert verdict.right, verdict
    assert verdict.quantities[0].points == REQUIRED
    (note,) = [note for note in verdict.notes if "lack of time" in note]
    assert all(name in note for name in ("batch 1", "odd sizes", "large offset", "sparse", "random"))


class Parity(Model):
    """Nearly constant at every second point."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        flat = torch.remainder((1e4 * self.norm.bias.detach().abs().sum()).floor(), 2) == 0
        return torch.where(flat, 3.0 + 1e-13 * y, y)


def test_a_point_that_cannot_tell_is_replaced() -> None:
    torch.manual_seed(0)
    inputs = (torch.rand(9, 4, 5, 6, 7),)
    exam = exam_of(Parity(), inputs)
    flat = [exam.known(exam.sheet(case)).truth["output"].std(correction=0) < 1e-9 for case in exam.cases]
    assert 5 < sum(map(bool, flat)) < len(flat) - 5
    verdict = examine(exam, InProcess(Parity()))
    assert verdict.right, verdict
    assert verdict.quantities[0].refused < 5


def test_undeclared_shapes_and_layouts_are_tried_unless_they_are_not_wanted() -> None:
    def only_contiguous(self: Any, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise ValueError("only contiguous inputs")
        return Model.forward(self, x)

    candidate = type("ModelNew", (Model,), {"forward": only_contiguous})()
    verdict = verify_modules(Model(), candidate, INPUTS)
    assert verdict.outcome == "wrong"
    assert "only contiguous inputs (channels-last: 3×4×5×6×7; --declared-only leaves it out)" in verdict.reasons[0]
    exam = exam_of(Model(), declared_only=True)
    assert examine(exam, InProcess(candidate)).right


@pytest.mark.parametrize("shape", [ONE, ODD, GAPS, DECLARED])
def test_a_mistake_at_one_shape_is_found(shape: str) -> None:
    inputs = (torch.rand(20, 4, 9, 9, 9),)
    exam = exam_of(Model(), inputs)
    wanted = exam.shapes[shape].inputs[0]

    def wrong_there(self: Any, x: Tensor) -> Tensor:
        y = Model.forward(self, x)
        return y * 1.01 if (x.shape, x.stride()) == (wanted.shape, wanted.stride()) else y

    assert examine(exam, InProcess(type("ModelNew", (Model,), {"forward": wrong_there})())).outcome == "wrong"


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu()


class ChannelsLast(Convolved):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous(memory_format=torch.channels_last)


class Contiguous(Convolved):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous()


def test_strides_are_part_of_the_contract_for_contiguous_inputs_only() -> None:
    inputs = (torch.rand(4, 3, 8, 9),)
    verdict = verify_modules(Convolved(), ChannelsLast(), inputs)
    assert verdict.outcome == "wrong"
    assert "strides" in verdict.reasons[0]
    kept = verify_modules(Convolved(), Contiguous(), inputs)
    assert kept.right, kept
    assert any("for channels-last inputs" in note for note in kept.notes)


class Dropped(Convolved):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.25, self.training)


class NeverDropped(Dropped):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(Convolved.forward(self, x), 0.25, training=False)


def test_both_modes_are_tried() -> None:
    inputs = (torch.rand(4, 3, 8, 9),)
    assert verify_modules(Dropped(), Dropped(), inputs).right
    for module in (Dropped(), Dropped().eval()):
        assert verify_modules(module, NeverDropped(), inputs).outcome == "wrong"


class Logarithm(Convolved):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x[:, :1]) + self.conv(x).mean((2, 3), keepdim=True)


def test_inputs_stay_in_the_declared_range_where_others_make_nan() -> None:
    inputs = (torch.rand(4, 3, 8, 9) + 0.5,)
    verdict = verify_modules(Logarithm(), Logarithm(), inputs)
    assert verdict.right, verdict
    assert any(note.startswith("left out: inputs outside [0.5") for note in verdict.notes)


class Counting(Convolved):
    """A batch_norm, and a buffer of integers that says how many samples there were."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4, momentum=momentum)
        self.register_buffer("samples", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.samples += len(x)
        return self.norm(self.conv(x))


class CountsNoSamples(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class CountsNoCalls(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.samples += len(x)
        norm = self.norm
        momentum = 1.0 if norm.momentum is None else norm.momentum
        statistics = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        return F.batch_norm(self.conv(x), *statistics, self.training, momentum, norm.eps)


def test_integers_among_the_buffers_are_compared() -> None:
    inputs = (torch.randn(4, 3, 8, 9),)
    assert verify_modules(Counting(), Counting(), inputs).right
    assert "buffer samples: differs" in str(verify_modules(Counting(), CountsNoSamples(), inputs).reasons)


def test_a_counter_of_calls_matters_only_where_it_is_read() -> None:
    inputs = (torch.randn(4, 3, 8, 9),)
    unread = verify_modules(Counting(), CountsNoCalls(), inputs)
    assert unread.right, unread
    assert any("num_batches_tracked is not PyTorch's" in note for note in unread.notes)
    read = verify_modules(Counting(None), CountsNoCalls(None), inputs)
    assert "buffer norm.num_batches_tracked: differs" in str(read.reasons)


class LogSigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.logsigmoid(x)


class Underflowing(LogSigmoid):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x).log()


@pytest.mark.parametrize("seed", range(4))
def test_large_values_of_both_signs_are_tried(seed: int) -> None:
    inputs = (torch.randn(8, 64),)
    assert verify_modules(LogSigmoid(), LogSigmoid(), inputs, seed=seed).right
    verdict = verify_modules(LogSigmoid(), Underflowing(), inputs, seed=seed)
    assert "large offset" in str(verdict.reasons), verdict


class LongProduct(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cumprod(16 * x, 1)


class LongProductInDouble(LongProduct):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).float()


def test_inputs_stay_in_the_declared_range_where_others_overflow() -> None:
    """In float64 a product of hundreds of numbers is finite, but its square is not."""
    verdict = verify_modules(LongProduct(), LongProductInDouble(), (torch.rand(16, 160) / 8,))
    assert verdict.right, verdict
    assert any("the reference gives NaN or infinity there" in note for note in verdict.notes)


def test_parameters_that_cancel_are_named() -> None:
    class Cancelling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.instance_norm(self.conv(x))

    verdict = verify_modules(Cancelling(), Cancelling(), (torch.rand(4, 3, 8, 9),))
    assert verdict.right, verdict
    assert "the result does not depend on conv.bias: anything done with it passes" in verdict.notes


def test_what_may_become_of_nan() -> None:
    truth = torch.tensor([[1.0, 2.0], [float("nan"), 4.0]])
    fault, note = lost_or_spread(truth.clone(), truth, truth, "NaN", 2)
    assert (fault, note) == (None, None)
    fault, _ = lost_or_spread(torch.zeros(2, 2), truth, truth, "NaN", 2)
    assert fault == "with NaN in the input the result lost it: 1 values are finite"
    everywhere = torch.full((2, 2), float("nan"))
    fault, _ = lost_or_spread(everywhere, truth, truth, "NaN", 2)
    assert fault == "with NaN in one sample the result has 2 such values in others"
    in_its_sample = torch.tensor([[1.0, 2.0], [float("nan"), float("nan")]])
    fault, note = lost_or_spread(in_its_sample, truth, truth, "NaN", 2)
    assert fault is None
    assert note is not None
    assert "spreads to 1 values" in note
    # Where PyTorch and the truth differ, nothing is asked.
    assert lost_or_spread(everywhere, torch.zeros(2, 2), everywhere, "NaN", 2) == (None, None)


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


class Conjugate(Spectrum):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).conj()


def test_both_parts_of_complex_results_are_judged() -> None:
    inputs = (torch.rand(8, 48),)
    verdict = verify_modules(Spectrum(), Spectrum(), inputs)
    assert verdict.right, verdict
    assert verdict.quantities[0].errors is not None
    assert verify_modules(Spectrum(), Conjugate(), inputs).outcome == "wrong"


class Magnitude(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft2(x).abs()


def test_magnitudes_of_complex_values_have_no_bounds_to_try() -> None:
    assert verify_modules(Magnitude(), Magnitude(), (torch.rand(4, 3, 12, 12),)).right


class Waves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * torch.arange(1.0, 9.0))


def test_inputs_without_samples_are_judged() -> None:
    assert verify_modules(Waves(), Waves(), (torch.tensor(0.7),)).right


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_point_for_which_memory_is_lacking_is_left_out_and_said(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    exam = exam_of(Model())
    made = exam.sheet

    def sheet(case: Any) -> Any:
        if case.shape == ODD:
            raise error
        return made(case)

    monkeypatch.setattr(exam, "sheet", sheet)
    verdict = examine(exam, InProcess(Honest()))
    assert verdict.right, verdict
    assert f"left out for lack of memory: {ODD}" in verdict.notes


def test_a_point_larger_than_memory_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    exam = exam_of(Model())
    monkeypatch.setattr("postlude.hardware.available_bytes", lambda _: exam.needed_bytes(ONE))
    verdict = examine(exam, InProcess(Honest()))
    assert verdict.right, verdict
    (note,) = [note for note in verdict.notes if "lack of memory" in note]
    assert ODD in note
    assert ONE not in note
    assert verdict.quantities[0].points > REQUIRED


class Greedy(Honest):
    """Claims at one shape that there is no memory."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().forward(x)


def test_a_candidate_that_lacks_memory_has_failed() -> None:
    assert verify_modules(Model(), Greedy(), INPUTS).outcome == "wrong"
