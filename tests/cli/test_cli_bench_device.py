"""`postlude bench` on a card, and the thin calls under it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cli.problem_texts import Run
from postlude.check.ceilings import memory_speed, product_speed
from postlude.check.clock import Calls, CudaEvents
from postlude.check.floor import clocks_apart
from postlude.check.footprint import launches, peak_bytes
from postlude.hardware import clock_mhz
from postlude.report import read

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def _window(call: Callable[[int], object], calls: int = 50) -> tuple[list[float], list[float]]:
    window = Calls(call, stopwatch=CudaEvents).window(0, calls)
    assert window.event_seconds is not None
    return [window.seconds], [window.event_seconds]


def test_both_clocks_agree_on_one_stream_and_not_on_two() -> None:
    a, b = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    side = torch.cuda.Stream()

    def elsewhere(_: int) -> None:
        with torch.cuda.stream(side):
            a @ b

    for call in (lambda _: a @ b, elsewhere):
        _window(call)
    assert clocks_apart("one stream", *_window(lambda _: a @ b)) is None
    assert clocks_apart("two streams", *_window(elsewhere)) is not None


def test_launches_and_memory() -> None:
    x = torch.rand(MIB // 4, device="cuda")
    assert launches(lambda: (x + 1) * 2) == 2
    assert peak_bytes(lambda: x + 1, "cuda") == MIB


def test_ceilings_are_those_of_a_card() -> None:
    assert 2e11 < memory_speed(256 * MIB, "cuda") < 2e13
    assert product_speed(torch.bfloat16, "bf16", "cuda") > product_speed(torch.float32, "fp32", "cuda")
    clock = clock_mhz("cuda")
    assert clock is None or clock > 100


@pytest.mark.usefixtures("fresh_dynamo")
def test_every_way_takes_part(run: Run, good: Path, candidate: Callable[[str], Path]) -> None:
    out = good.parent / "out.json"
    path = candidate("self.norm(self.conv(x)).clamp(min=0)")
    assert run("bench", good, path, "--device", "cuda", "--rounds", "3", "--train", "--json", out).code == 0
    (report,) = read(out)
    warm, step = report.races[0], report.races[-1]
    assert [race.direction for race in report.races] == ["forward", "forward", "backward", "training step"]
    ours = {
        "eager",
        "eager, cudnn.benchmark",
        "eager, channels-last",
        "torch.compile",
        "torch.compile, max-autotune",
        "postlude",
    }
    assert {entry.variant for entry in warm.entries} == ours | {"candidate"}
    assert {entry.variant for entry in step.entries} == ours
    assert all(entry.event_seconds is not None for entry in warm.entries if entry.variant != "candidate")
    assert report.findings == ()
    assert all(one.launches for one in report.variants if one.name != "candidate")
