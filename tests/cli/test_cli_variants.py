"""What takes turns, and what is looked at meanwhile; candidates and cards are stand-ins here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cli.problem_texts import GOOD, Write
from postlude.check.clock import Estimate, Window
from postlude.check.floor import Work
from postlude.check.isolation import Timed
from postlude.check.points import random_state
from postlude.check.supply import Supply, Turns
from postlude.cli import variants
from postlude.cli.frame import Settings
from postlude.cli.measure import Timer, histograms_of
from postlude.cli.session import Opened, open_problem
from postlude.cli.variants import FORWARD, STEP, WITH_GRAPH, Isolated, Runner, input_sets, pytorch_ways
from postlude.cli.watch import Watch, crowded, is_random

SMALL = GOOD.replace("4, 3, 18, 34, 36", "2, 3, 5, 6, 7")


@pytest.fixture
def opened(write: Write) -> Opened:
    return open_problem(Settings("cpu", "auto"), write(SMALL))


class FakeCandidate:
    """Answers with the sum of the inputs of a call in the middle."""

    def __init__(self) -> None:
        self.signals: list[float] = []

    def time_calls(self, turns: Turns, training: bool, signal_s: float) -> Timed:
        assert training
        self.signals.append(signal_s)
        call = len(turns) // 2
        return Timed(0.25, len(turns), call, turns.inputs(call)[0].sum())


def test_one_result_of_a_candidate_is_judged_in_every_window() -> None:
    fake, judged = FakeCandidate(), []
    contestant = Isolated(fake, Supply([(torch.rand(6000),)]), judged.append, training=True)  # type: ignore[arg-type]
    for calls in range(1, 20):
        window = contestant.window(0, calls, None)
        assert (window.seconds, window.calls, window.inputs) == (0.25, calls, None)
        # Judged at once: the next window's inputs are in the same memory.
        assert torch.equal(judged[-1].output, judged[-1].inputs[0].sum())
    assert len(judged) == 19
    assert all(0 <= signal <= 20 * 0.25 for signal in fake.signals)
    assert len(set(fake.signals)) == 19


@pytest.mark.parametrize("seconds", [0.05, 5.0])
def test_signals_come_at_any_time_of_a_window_and_often_early(seconds: float) -> None:
    found = [variants._moment(seconds) for _ in range(2000)]
    assert 0 <= min(found) < max(found) <= seconds
    assert 0.15 < sum(one > seconds / 2 for one in found) / 2000 < 0.45
    assert 0.15 < sum(one < seconds / 50 for one in found) / 2000 < 0.45


def test_what_a_compiler_prints_unasked_is_not_shown(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def talkative(model: Any, mode: str | None) -> Any:
        return lambda x: (sys.stderr.write("Autotune Choices Stats"), model(x))[1]

    monkeypatch.setattr(torch, "compile", talkative)
    monkeypatch.setattr(variants, "no_compiler", lambda _: None)
    state, sets = random_state(opened.model, 1), input_sets(opened, "cpu")
    found = variants.compiled_ways(opened, "cpu", state, sets, [FORWARD], "all")
    assert len(found.runners) == 2
    assert "Autotune" not in capsys.readouterr().err


def test_eager_ways_here(opened: Opened) -> None:
    state = random_state(opened.model, 1)
    sets = input_sets(opened, "cpu")
    found = pytorch_ways(opened, "cpu", state, sets, level="usual")
    assert [runner.name for runner in found.runners] == ["eager", "eager, channels-last"]
    laid_out = found.runners[1].sets[0][0]
    assert laid_out.is_contiguous(memory_format=torch.channels_last_3d)
    opened.model.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(found.runners[1].model(laid_out), opened.model(*sets[0]))
    assert [sentence.split(":")[0] for sentence in found.left_out] == [
        "eager, cudnn.benchmark",
        "torch.compile, max-autotune",
    ]


def test_eager_ways_on_a_card(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(opened.problem), "build", lambda self, device: opened.model)
    found = pytorch_ways(opened, "cuda", opened.model.state_dict(), [opened.inputs], level="all")
    assert [runner.name for runner in found.runners] == ["eager", variants.BENCHMARKED, variants.CHANNELS_LAST]
    assert found.left_out == []
    assert not torch.backends.cudnn.benchmark
    with found.runners[1].around():
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark


def test_each_kind_of_work_runs_as_it_says(opened: Opened) -> None:
    seen: list[tuple[bool, bool]] = []

    def model(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), x.requires_grad))
        return opened.model(x)  # type: ignore[no-any-return]

    runner = Runner("eager", model, [opened.inputs])
    for work in (FORWARD, WITH_GRAPH, STEP):
        runner.contestant(work, opened.output, Supply(runner.sets), "cpu").window(0, 1, None)
    assert seen == [(False, False), (True, True), (True, True)]
    assert all(parameter.grad is not None for parameter in opened.model.parameters())


def test_caches_are_flushed_before_every_call(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr("postlude.cli.measure.flusher", lambda _: lambda: events.append("flush"))
    runner = Runner("eager", lambda x: events.append("call"), [opened.inputs])

    def once(contestants: dict[str, Any], **_: object) -> dict[str, Estimate]:
        for contestant in contestants.values():
            contestant.window(0, 2, None)
        seconds = {"eager": 0.5, "slow": 0.25}
        return {name: Estimate.of([seconds.get(name, 0.25)] * 3) for name in contestants}

    monkeypatch.setattr("postlude.cli.measure.time_interleaved", once)
    runners = [runner, Runner("slow", lambda x: events.append("call"), [opened.inputs])]
    found, lost = Timer(runners, opened.output, "cpu", 1, 1.0).flushed(Watch(None, "fp32", "cpu"))
    assert events == ["flush", "call"] * 4 + ["flush"] * 2
    # What is left beside the flush is the call; where nothing is left, that is said.
    assert {name: timing.median for name, timing in found.items()} == {"eager": 0.25}
    assert lost == ["flushed caches, slow: too short relative to what is subtracted from it"]


@pytest.mark.parametrize(("work", "samples"), [(Work(4000, 0), 10), (Work(3 << 30, 0), 2), (Work(4000, 10**10), 2)])
def test_errors_of_large_problems_are_those_of_two_samples(work: Work, samples: int) -> None:
    found, left_out = histograms_of(nn.Tanh(), {"eager": torch.tanh}, (torch.rand(10, 50),), work, "cpu")
    assert left_out == []
    assert found[0].exact + sum(found[0].counts) == 50 * samples


def test_a_wrong_result_of_a_timed_call_is_noted() -> None:
    inputs = [(torch.randn(8),), (torch.randn(8),)]
    watch = Watch(torch.sin, "fp32", "cpu")
    watch("honest", Window(0.05, 10, 3, inputs[1][0].sin(), inputs=inputs[1]))
    watch("stale", Window(0.05, 10, 2, inputs[1][0].sin(), inputs=inputs[0]))
    watch("unseen", Window(0.05, 10))
    assert list(watch.wrong) == ["stale"]
    assert "the result of a timed call of stale differs from PyTorch's" in watch.wrong["stale"]
    assert watch.checked == {"honest": 1, "stale": 1}


def test_two_clocks_that_differ_are_a_finding() -> None:
    watch = Watch(None, "fp32", "cpu")
    for _ in range(5):
        watch("honest", Window(0.05, 10, event_seconds=0.0499))
        watch("side stream", Window(0.05, 10, event_seconds=0.001))
    (finding,) = watch.disagreements
    assert "side stream" in finding
    assert watch.event_seconds("honest") == pytest.approx(0.00499)


def test_a_model_that_draws_its_result_is_not_compared() -> None:
    assert not is_random(lambda x: x + 1, (torch.ones(64),), "fp32")
    assert is_random(lambda x: x + torch.rand(64), (torch.ones(64),), "fp32")


def test_sets_differ(opened: Opened, tmp_path: Path) -> None:
    first, second, third = (one[0] for one in input_sets(opened, "cpu"))
    assert not torch.equal(first, second)
    assert float(third.mean(dim=(2, 3, 4)).std()) > 5 * float(first.mean(dim=(2, 3, 4)).std())


@pytest.mark.parametrize(("load", "device", "said"), [(0.4, "cpu", False), (7.5, "cpu", True), (7.5, "cuda", False)])
def test_a_crowded_machine_is_a_finding(load: float, device: str, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.hardware.load_average", lambda: load)
    monkeypatch.setattr("postlude.hardware.usable_cores", lambda: 4)
    assert (crowded(device) is not None) == said
