"""Candidates that are right until they are timed get no speed-up from `bench`; honest ones that keep something do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cli.problem_texts import Run
from postlude.check import ceilings
from postlude.check.floor import Ceilings
from postlude.report import Report, read

CORPUS = Path(__file__).parent.parent / "corpus" / "timed"
CHEATS, HONEST = (sorted((CORPUS / kind).glob("*.py")) for kind in ("cheats", "honest"))
TRUE = 3.0  # times as fast as PyTorch a candidate that does all of the work is at most; the tricks once gave 60 to 105
Bench = Callable[..., tuple[int, str, Report]]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def bench(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    # One thread: on cores that others use, two wait for each other most of the time.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(ceilings.SIDES, "cpu", 256)
    monkeypatch.setitem(ceilings.VOLUMES, "cpu", (1, 16, 32))
    # Each is to be found by what it answers, not by its time.
    monkeypatch.setattr("postlude.check.floor.BELIEVABLE", 1e9)
    out = tmp_path / "out.json"
    options = ("--device", "cpu", "--rounds", "4", "--seconds", "2", "--baselines", "few", "--no-flush", "--json", out)

    def timed(path: Path, reference: Path = CORPUS / "reference.py") -> tuple[int, str, Report]:
        ran = run("bench", reference, path, *options)
        (report,) = read(out)
        return ran.code, ran.out, report

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield timed
    torch.set_num_threads(threads)


@pytest.mark.parametrize("path", CHEATS, ids=lambda path: path.stem)
def test_a_cheat_gets_no_speed_up(bench: Bench, path: Path) -> None:
    code, out, report = bench(path)
    entry = report.entry(report.main_race, "candidate")
    if code == 0:  # it found nothing to skip, so it did all of the work, and its speed is the true one
        assert entry is not None
        assert entry.times_eager is not None
        assert entry.times_eager.median < TRUE, out
        return
    assert code == 1, out
    assert entry is None or entry.times_eager is None
    assert "Candidate runs at" not in out
    assert not report.variant("candidate").note.startswith("right")


@pytest.mark.parametrize("path", HONEST, ids=lambda path: path.stem)
def test_an_honest_candidate_gets_its_ratio(bench: Bench, path: Path) -> None:
    code, out, report = bench(path)
    entry = report.entry(report.main_race, "candidate")
    assert code == 0, out
    assert entry is not None
    assert entry.times_eager is not None
    assert "Candidate runs at" in out


def test_a_true_speed_up_is_shown(bench: Bench, tmp_path: Path) -> None:
    """The reference moves its values to and fro, the candidate does not."""
    text = (CORPUS / "reference.py").read_text(encoding="utf-8")
    slow = tmp_path / "slow.py"
    slow.write_text(text.replace("self.conv(x)", "self.conv(x)" + 200 * ".flip(4)"), encoding="utf-8")
    code, out, report = bench(CORPUS / "honest" / "buffer_by_shape.py", slow)
    entry = report.entry(report.main_race, "candidate")
    assert code == 0, out
    assert entry is not None
    assert entry.times_eager is not None
    assert entry.times_eager.median > 1.3, out


def test_a_time_that_cannot_be_believed_gets_no_ratio(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that computes this slowly, although every result is right."""
    monkeypatch.setattr("postlude.check.floor.BELIEVABLE", 1e-3)
    monkeypatch.setattr("postlude.cli.bench.ceilings_of", lambda *_: Ceilings(1e15, 1e3))
    code, out, report = bench(CORPUS / "honest" / "moments_only.py")
    assert code == 1, out
    assert report.judgement.outcome == "cannot tell"
    assert out.startswith("Cannot tell in fp32: the time of candidate cannot be believed: one call takes")
    assert "Candidate runs at" not in out


def test_the_readme_counts_them() -> None:
    readme = " ".join((CORPUS.parent.parent.parent / "README.md").read_text(encoding="utf-8").split())
    assert f"a false ratio for none of {len(CHEATS)} more cheats, which are right until they are timed" in readme
