"""`postlude suite --jobs N`: problems prepare together and are timed alone, and none of them stops the others."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli import pretend_problem
from cli.problem_texts import Run
from postlude.cli import suite_batch, suite_process
from postlude.cli.suite_batch import Told, beside, run_batch
from postlude.cli.suite_process import PREPARING, WAITING, Child, Ended
from postlude.report import read
from postlude.report.model import as_dict
from report.sample import FULL

LIMIT_S = 60.0


@dataclass(frozen=True)
class Spell:
    name: str
    what: str
    start: float
    end: float


def _overlaps(spells: Sequence[Spell]) -> list[tuple[Spell, Spell]]:
    """What went on while something was timed."""
    return [
        (one, other)
        for one, other in itertools.permutations(spells, 2)
        if one.what == "timing" and one.start < other.end and other.start < one.end
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files for processes that only pretend."""
    monkeypatch.setattr(suite_process, "COMMAND", [sys.executable, "-S", pretend_problem.__file__])
    (tmp_path / "report.json").write_text(json.dumps(as_dict(FULL)), encoding="utf-8")
    return tmp_path


def _put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / f"{name}.py").write_text("class Model: ...\n")


def _batch(folder: Path, *names: str, limit: float = LIMIT_S, prepared: Any = lambda _: None) -> dict[str, Ended]:
    found: dict[str, Ended] = {}
    requests = [{"file": str(folder / f"{name}.py"), "device": "cpu"} for name in names]
    told = Told(lambda place, outcome: found.update({names[place]: outcome}), lambda _: None, prepared)
    run_batch(requests, limit, told)
    return found


def _spells(folder: Path) -> list[Spell]:
    return [Spell(*json.loads(line)) for line in (folder / "times.jsonl").read_text().splitlines()]


def _is_running(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def _pids(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.pid")]


def test_a_batch_prepares_together_and_is_timed_alone(folder: Path) -> None:
    said: list[str] = []
    found = _batch(folder, "2_slow", "0_quick", "1_middle", prepared=said.append)
    assert all(outcome.report is not None for outcome in found.values())
    assert said == ["0 preparing, 3 ready, 0 timed"]
    spells = _spells(folder)
    assert _overlaps(spells) == []
    preparing = [spell for spell in spells if spell.what == "preparing"]
    assert max(spell.start for spell in preparing) < min(spell.end for spell in preparing)
    assert [spell.name for spell in spells if spell.what == "timing"] == ["2_slow", "0_quick", "1_middle"]


def _all_at_once(waiting: Sequence[Child], settle: Callable[[Child], None], tell: Callable[[], None]) -> None:
    for child in waiting:
        child.line.sendall(suite_process.GO)
    for child in waiting:
        child.time()
        settle(child)


def _as_soon_as_ready(children: Sequence[Child], settle: Callable[[Child], None], tell: Callable[[], None]) -> None:
    while any(child.state == PREPARING for child in children):
        for child in children:
            if child.state == PREPARING:
                child.line.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    child.look(True)
                child.line.setblocking(True)
            if child.state == WAITING:
                child.time()
                settle(child)


@pytest.mark.parametrize(
    ("part", "mutant", "seen"),
    [("time_in_turn", _all_at_once, "timing"), ("prepare", _as_soon_as_ready, "preparing")],
)
def test_the_check_sees_what_runs_beside_the_timing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, mutant: Any, seen: str
) -> None:
    monkeypatch.setattr(suite_batch, part, mutant)
    _batch(folder, "2_slow", "0_quick", "1_middle")
    assert seen in {other.what for _, other in _overlaps(_spells(folder))}


def test_one_that_dies_or_hangs_takes_nobody_with_it_and_waiting_costs_nothing(folder: Path) -> None:
    limit, start = 3.0, time.monotonic()
    names = ("0_good", "1_dies", "2_hangs", "3_waits_badly", "4_hangs_late", "6_good")
    found = _batch(folder, *names, limit=limit)
    over = "it took longer than 3 s and was ended"
    reasons = {name: outcome.reason for name, outcome in found.items()}
    died = "its process ended with signal SIGABRT and no result; it said last: about to fail"
    left = "its process ended with exit code 1 and no result; it said last: no patience"
    expected = {"1_dies": died, "2_hangs": over, "3_waits_badly": left, "4_hangs_late": over}
    assert reasons == {"0_good": "", "6_good": "", **expected}
    assert list(found)[:2] == ["1_dies", "2_hangs"]  # each is kept as soon as it has ended
    # The last one was there for longer than the limit, most of it waiting.
    assert time.monotonic() - start > limit + 2
    assert found["6_good"].seconds < limit
    assert not any(map(_is_running, _pids(folder)))
    assert not _sleepers() & set(_pids(folder))  # each problem leads a group of its own


def _sleepers() -> set[int]:
    """The groups of the processes that a hanging problem started and that still run."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended while we looked
            if entry.read_bytes() == b"sleep\x00300\x00":
                found.add(os.getpgid(int(entry.parent.name)))
    return found


def test_an_interruption_ends_every_process(folder: Path) -> None:
    def interrupt(_: str) -> None:
        assert all(map(_is_running, _pids(folder)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _batch(folder, "0_a", "1_b", "2_c", prepared=interrupt)
    assert len(_pids(folder)) == 3
    assert not any(map(_is_running, _pids(folder)))


def test_rows_by_number_results_kept_and_the_greedy_again_alone(run: Run, folder: Path) -> None:
    _put(folder, "1_memory", "2_slow", "3_quick", "4_partly", "10_dies")
    out, kept = folder / "out.json", folder / "kept"
    call = ("suite", folder, "--device", "cpu", "--jobs", "4", "--results", kept, "--json", out)
    ran = run(*call)
    reports = read(out)
    assert [one.title for one in reports] == ["1_memory.py", "2_slow.py", "3_quick.py", "4_partly.py", "10_dies.py"]
    assert [one.judgement.outcome for one in reports[:4]] == ["right"] * 4
    assert reports[3].left_out == FULL.left_out  # what neighbours cost it is not in its report
    assert next(line for line in ran.sentences if "memory" in line) == (
        "postlude: There was not enough memory for 1_memory, 4_partly beside others: run again alone."
    )
    assert "postlude: 1 to 4 of 5: 0 preparing, 3 ready, 0 timed, 1 failed …" in ran.err
    assert json.loads((kept / "2_slow.json").read_text())["timing"] == [1.0, 2.0]
    spells = len(_spells(folder))
    (kept / "3_quick.json").unlink()
    assert run(*call).code == 1
    assert len(_spells(folder)) == spells + 2  # prepared and timed once more: the others were not started
    assert [one.title for one in read(out)] == [one.title for one in reports]


def test_several_share_the_cores_while_they_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.hardware.usable_cores", lambda: 16)
    assert beside(1, "cuda") == {}
    assert beside(5, "cuda") == {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "3"}
    assert beside(40, "cuda")["OMP_NUM_THREADS"] == "1"
    assert beside(5, "cpu") == {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
