"""`postlude bench`: what is timed, what may be shown, what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.problem_texts import GOOD, Run, Write
from postlude.check import ceilings, records
from postlude.check.floor import Ceilings
from postlude.check.isolation import CandidateFailed
from postlude.cli import bench, bench_entry, measure
from postlude.cli.frame import Settings
from postlude.hardware import cpp_compiler
from postlude.report import Report, read

FEW = ("--device", "cpu", "--rounds", "3", "--seconds", "0.5")
Candidate = Callable[[str], Path]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products: the roof is lower than the machine's, which only raises questions."""
    monkeypatch.setitem(ceilings.SIDES, "cpu", 256)
    monkeypatch.setitem(ceilings.VOLUMES, "cpu", (1, 16, 32))


@pytest.fixture
def small(write: Write) -> Path:
    """Too small to be fused, and quickly judged."""
    return write(GOOD.replace("4, 3, 18, 34, 36", "2, 3, 8, 10, 12"), "small.py")


def _entries(report: Report) -> dict[str, set[str]]:
    return {race.name: {entry.variant for entry in race.entries} for race in report.races}


def test_nothing_is_measured_before_all_is_prepared(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for place, name in ((bench_entry, "first_calls"), (bench, "ceilings_of"), (measure, "time_interleaved")):
        monkeypatch.setattr(place, name, _noted(done, name, getattr(place, name)))
    options = bench.Options(small, rounds=3, seconds=0.1, flushed=False, baselines="few")
    bench.run(Settings("cpu", "auto"), options, lambda: done.append("prepared"))
    assert done == ["first_calls", "first_calls", "prepared", "ceilings_of", "time_interleaved", "ceilings_of"]


def _noted(done: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: done.append(name) or function(*args, **kwargs)


@pytest.mark.skipif(cpp_compiler() is None, reason="torch.compile needs a C++ compiler")
def test_all_variants_and_an_honest_candidate(run: Run, good: Path, candidate: Candidate) -> None:
    out, csv, page = (good.parent / name for name in ("out.json", "rows.csv", "out.html"))
    path = candidate("self.norm(self.conv(x)).clamp(min=0)")
    ran = run("bench", good, path, *FEW, "--json", out, "--csv", csv, "--report", page)
    assert ran.code == 0
    (report,) = read(out)
    ours = {"eager", "eager, channels-last", "torch.compile", "postlude"}
    entries = _entries(report)
    assert entries.keys() == {"forward, warm", "forward, caches flushed"}
    warm, flushed = entries.values()
    assert warm == ours | {"candidate"}
    # On a busy machine a call may be lost in the time of the flush, which is subtracted from it; it is then named.
    lost = {name for name in ours if any(f"flushed caches, {name}:" in why for why in report.left_out)}
    assert flushed | lost == ours
    assert report.subject == "candidate"
    assert report.judgement.outcome == "right"
    for entry in report.races[0].entries:
        assert entry.seconds.low <= entry.seconds.median <= entry.seconds.high
        assert (entry.times_eager is None) == (entry.variant == "eager")
        assert (entry.times_compile is None) == (entry.variant == "torch.compile")
    assert report.roofline is not None
    assert all(point.share > 0 for point in report.roofline.points)
    assert {one.variant for one in report.histograms} == {"eager", "postlude", "candidate"}
    assert all(one.peak_bytes is not None for one in report.variants if one.name != "candidate")
    written = {"forward": warm, "forward, flushed": flushed}
    found = sorted((row.mode, row.variant) for row in records.read(csv))
    assert found == sorted((mode, name) for mode, names in written.items() for name in names)
    assert "Right in fp32" in page.read_text(encoding="utf-8")
    assert "Left out: eager, cudnn.benchmark" in ran.out


@pytest.mark.usefixtures("no_compiler")
def test_wrong_candidate_gets_no_speed_up(run: Run, small: Path, candidate: Candidate) -> None:
    out = small.parent / "out.json"
    ran = run("bench", small, candidate("torch.zeros_like(self.conv(x))"), *FEW, "--no-flush", "--json", out)
    assert ran.code == 1
    assert "The candidate failed verification: it was not timed." in ran.out
    assert "no C++ compiler here" in ran.out
    assert json.loads(out.read_text(encoding="utf-8"))["exit_code"] == 1
    (report,) = read(out)
    assert _entries(report) == {"forward, warm": {"eager", "eager, channels-last", "postlude"}}
    assert report.judgement.outcome == "wrong"
    assert report.variant("candidate").judgement == report.judgement


@pytest.mark.usefixtures("no_compiler")
def test_a_candidate_that_is_right_only_until_it_is_timed(run: Run, small: Path, candidate: Candidate) -> None:
    """It looks who calls it, and answers zeros when that is the function that is timed."""
    path = candidate("self.answer(torch.relu(self.norm(self.conv(x))))")
    path.write_text(
        "import sys\n"
        + path.read_text(encoding="utf-8")
        + """

def answer(self, y):
    frame, names = sys._getframe(), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return 0 * y if "window" in names else y


ModelNew.answer = answer
""",
        encoding="utf-8",
    )
    out = small.parent / "out.json"
    ran = run("bench", small, path, *FEW, "--no-flush", "--json", out)
    assert ran.code == 1
    (report,) = read(out)
    assert any("the result of a timed call of candidate differs" in why for why in report.judgement.reasons)
    entry = report.entry(report.main_race, "candidate")
    assert entry is not None
    assert entry.times_eager is None
    assert "its speed-up is not shown" in ran.out


@pytest.mark.usefixtures("no_compiler")
def test_a_candidate_is_timed_in_the_mode_of_the_model(run: Run, write: Write) -> None:
    """A batch_norm answers otherwise in eval mode, and files run in training mode unless they say otherwise."""
    text = GOOD.replace("4, 3, 18, 34, 36", "2, 3, 8, 10, 12").replace(
        "nn.GroupNorm(groups, channels)", "nn.BatchNorm3d(channels)"
    )
    path, other = write(text), write(text.replace("Model", "ModelNew"), "candidate.py")
    out = path.parent / "out.json"
    assert run("bench", path, other, *FEW, "--baselines", "few", "--no-flush", "--json", out).code == 0
    (report,) = read(out)
    assert report.judgement.outcome == "right"
    assert {one.variant for one in report.histograms} == {"eager", "postlude", "candidate"}
    assert all(one.worst < 1e-4 for one in report.histograms)


@pytest.mark.usefixtures("no_compiler")
def test_a_candidate_that_ends_while_it_is_timed(
    run: Run, small: Path, candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise CandidateFailed("its process was ended by signal 11")

    monkeypatch.setattr("postlude.cli.variants.Isolated.window", gone)
    out = small.parent / "out.json"
    path = candidate("self.norm(self.conv(x)).clamp(min=0)")
    assert run("bench", small, path, *FEW, "--baselines", "few", "--no-flush", "--json", out).code == 1
    (report,) = read(out)
    assert report.judgement.reasons == ("while it was timed, its process was ended by signal 11",)
    assert _entries(report) == {"forward, warm": {"eager", "postlude"}}


@pytest.mark.usefixtures("no_compiler")
def test_a_time_that_cannot_be_is_a_failure(run: Run, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that copies this slowly nothing could be as fast as this, eager PyTorch apart."""
    monkeypatch.setattr("postlude.cli.bench.ceilings_of", lambda *_: Ceilings(1e3, 1e15))
    monkeypatch.setattr("postlude.check.floor.holds", lambda *_: True)
    out = small.parent / "out.json"
    assert run("bench", small, *FEW, "--no-flush", "--json", out).code == 1
    (report,) = read(out)
    assert report.judgement.outcome == "wrong"
    assert "it does not do the work" in report.judgement.reasons[0]
    assert any("eager takes" in finding for finding in report.findings)
    entry = report.entry(report.main_race, "postlude")
    assert entry is not None
    assert entry.times_eager is None


@pytest.mark.usefixtures("no_compiler")
def test_training(run: Run, good: Path) -> None:
    out = good.parent / "out.json"
    assert run("bench", good, "--train", *FEW, "--no-flush", "--json", out).code == 0
    (report,) = read(out)
    assert {race.direction for race in report.races} == {"forward", "backward", "training step"}
    assert any("which PyTorch runs: gradients are needed" in line for line in report.left_out)
    assert {entry.variant for entry in report.races[2].entries} == {"eager", "eager, channels-last", "postlude"}
    saved = report.variant("eager").saved_bytes
    assert saved is not None
    assert saved > 4 * 8 * 16 * 32 * 34 * 4  # the convolution's result, at least


def test_an_unknown_word(run: Run, good: Path) -> None:
    ran = run("bench", good, "--device", "cpu", "--baselines", "some")
    assert ran.code == 2
    assert ran.sentences == ["postlude: --baselines some is unknown; use few, usual or all."]
