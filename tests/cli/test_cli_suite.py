"""`postlude suite`: every problem gets its row, whatever becomes of it, and nothing is done twice."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cli.problem_texts import GOOD, NOTHING, Run
from postlude.cli import suite as work
from postlude.cli.suite_batch import Told
from postlude.cli.suite_process import Ended
from postlude.cli.variants import STEP
from postlude.report import gather, model, read
from postlude.report.suite import geometric_mean, row_of
from report.sample import FULL

QUICK = ("--device", "cpu", "--baselines", "few", "--rounds", "3", "--seconds", "0.3")
CRASH = GOOD + "\nimport ctypes\nprint('about to fail')\nctypes.string_at(0)\n"
RAISES = GOOD.replace("def get_inputs():", "def get_inputs():\n    raise ValueError('no data here')")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "problems" / "level2").mkdir(parents=True)
    return tmp_path / "problems"


def _put(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / "level2" / f"{name}.py").write_text(text, encoding="utf-8")


def test_steps_and_other_shapes_on_request(run: Run, folder: Path, tmp_path: Path) -> None:
    """What was timed with other shapes is kept beside the files' own."""
    sized = GOOD.replace("def get_inputs():", "batch_size, height = 8, 9\n\n\ndef get_inputs():", 1)
    _put(folder, p1_good=sized.replace(_first_size(sized), "torch.randn(batch_size, "))
    out, kept = tmp_path / "out.json", tmp_path / "kept"
    ran = run("suite", folder, *QUICK, "--train", "--shapes", "other", "--results", kept, "--json", out)
    assert ran.code == 0, ran.err
    assert STEP in out.read_text(encoding="utf-8")
    (report,) = read(out)
    assert report.shape.startswith("5×")
    assert [path.name for path in kept.iterdir()] == ["level2__p1_good.other-shapes.json"]
    assert run("suite", folder, *QUICK, "--shapes", "round", "--results", kept).code == 2


def _first_size(text: str) -> str:
    """The call that draws the input, up to its batch."""
    found = re.search(r"torch\.randn?\(\d+, ", text.split("def get_inputs")[1])
    assert found is not None
    return found[0]


def test_a_row_has_steps_errors_and_the_roofline() -> None:
    """Of the sample report, which has all of them; the mean is of the ratios that are shown."""
    row = row_of(FULL)
    assert row.steps
    assert row.share is not None
    assert row.error is not None
    assert row.own_error is not None
    mean = geometric_mean([row, row_of(gather.failure("other.py", "no", "cpu", "fp32"))], model.EAGER)
    assert mean == pytest.approx(row.ratios[model.EAGER].median)
    assert geometric_mean([], model.EAGER) is None


def _assert_timed_alone(kept: Sequence[dict[str, list[float]]]) -> None:
    prepared = [one["preparing"][1] for one in kept if "preparing" in one]
    timed = sorted(one["timing"] for one in kept if "timing" in one)
    assert len(prepared) == 3  # the one that crashed has nothing to say
    assert len(timed) == 2
    assert max(prepared) < timed[0][0] < timed[0][1] < timed[1][0] < timed[1][1]


def test_good_declined_crashing_and_raising_problems(run: Run, folder: Path, tmp_path: Path) -> None:
    _put(folder, p1_good=GOOD, p2_nothing=NOTHING, p3_crash=CRASH, p10_raises=RAISES)
    out, page, kept = tmp_path / "out.json", tmp_path / "out.html", tmp_path / "kept"
    ran = run("suite", folder, *QUICK, "--jobs", "4", "--results", kept, "--json", out, "--report", page)
    assert ran.code == 1
    reports = read(out)
    assert [report.title for report in reports] == ["p1_good.py", "p2_nothing.py", "p3_crash.py", "p10_raises.py"]
    assert [report.judgement.outcome for report in reports] == ["right", "declined", "failed", "failed"]
    reasons = [report.judgement.reasons[0] for report in reports[2:]]
    assert "its process ended with signal SIGSEGV and no result; it said last: about to fail" in reasons[0]
    assert "get_inputs() raises ValueError: no data here" in reasons[1]
    assert json.loads(out.read_text(encoding="utf-8"))["failed"] == 2
    assert STEP not in out.read_text(encoding="utf-8")
    assert len(list(kept.iterdir())) == 4
    assert "4 problems: 1 right, 1 declined, 2 failed." in ran.out
    assert "fast_1.5" in ran.out
    assert "Against torch.compile: not timed." in ran.out
    assert "no data here" in page.read_text(encoding="utf-8")
    _assert_timed_alone([json.loads(path.read_text(encoding="utf-8")) for path in kept.iterdir()])

    again = run("suite", folder, *QUICK, "--results", kept)
    assert again.code == 1
    assert again.out == ran.out  # to the last digit: nothing was timed again
    assert again.sentences == []


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Problems take no time: their name says how they end."""
    begun: list[str] = []

    def pretend(requests: Sequence[Mapping[str, str]], limit: float, told: Told) -> None:
        for place, request in enumerate(requests):
            name = Path(request["file"]).name
            begun.append(name)
            told.keep(place, Ended(None, "it fell over") if "crash" in name else Ended(FULL))

    monkeypatch.setattr(work, "run_batch", pretend)
    return begun


def test_only_what_changed_or_was_asked_for_is_run_again(
    run: Run, folder: Path, tmp_path: Path, instant: list[str]
) -> None:
    _put(folder, a=GOOD, b=GOOD, crash=GOOD)
    call = ("suite", folder, *QUICK, "--results", tmp_path / "kept")

    def begun_by(*more: str) -> list[str]:
        instant.clear()
        assert run(*call, *more).code == 1
        return sorted(instant)

    assert begun_by() == ["a.py", "b.py", "crash.py"]
    assert begun_by() == []
    assert begun_by("--again", "failed") == ["crash.py"]
    assert begun_by("--again", "all") == ["a.py", "b.py", "crash.py"]
    _put(folder, b=GOOD + "\n# changed\n")
    assert begun_by() == ["b.py"]
    assert begun_by("--rounds", "4") == ["a.py", "b.py", "crash.py"]
    assert begun_by("--train") == ["a.py", "b.py", "crash.py"]
    assert begun_by() == ["a.py", "b.py", "crash.py"]
    (tmp_path / "kept" / "level2__a.json").write_text("half of")
    assert begun_by() == ["a.py"]


def test_a_wrong_problem_is_an_exit_code(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(folder, a=GOOD)
    wrong = gather.failure("a.py", "", "cpu", "auto")
    for outcome, code in (("wrong", 1), ("failed", 1), ("declined", 0), ("cannot tell", 0), ("right", 0)):
        report = dataclasses.replace(wrong, judgement=model.Judgement(outcome, ("why",)))
        monkeypatch.setattr(work, "run_batch", lambda _, __, told, report=report: told.keep(0, Ended(report)))
        assert run("suite", folder, *QUICK, "--results", tmp_path / "kept", "--again", "all").code == code


def test_an_interrupted_suite_keeps_what_it_has(
    run: Run, folder: Path, tmp_path: Path, instant: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(folder, a=GOOD, b=GOOD)
    pretend = work.run_batch

    def interrupted(requests: Sequence[Mapping[str, str]], limit: float, told: Told) -> None:
        if requests[0]["file"].endswith("b.py"):
            raise KeyboardInterrupt
        pretend(requests, limit, told)

    monkeypatch.setattr(work, "run_batch", interrupted)
    call = ("suite", folder, *QUICK, "--results", tmp_path / "kept")
    assert run(*call).code == 130
    monkeypatch.setattr(work, "run_batch", pretend)
    assert run(*call).code == 0
    assert instant == ["a.py", "b.py"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none"], "there is no such folder"),
        (["."], "no file fits * and has a class Model"),
        (["problems", "--only", "99_*"], "no file fits 99_* and has a class Model"),
        (["problems", "--again", "some"], "--again some is unknown; use none, failed or all."),
        (["problems", "--report", "out.txt"], "a report is written as"),
        (["problems", "--results", "file"], "results cannot be kept there"),
        (["problems", "--jobs", "0"], "--jobs 0 would prepare no problem; use 1 or more."),
    ],
)
def test_one_sentence_for_what_cannot_be(
    run: Run, folder: Path, tmp_path: Path, arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    if arguments[0] != ".":
        _put(folder, a=GOOD)
    monkeypatch.chdir(tmp_path)
    ran = run("suite", *arguments, "--device", "cpu")
    assert ran.code == 2
    assert len(ran.sentences) == 1
    assert sentence in ran.sentences[0]


def test_names_that_differ_in_strange_letters_alone_have_files_of_their_own(
    run: Run, folder: Path, tmp_path: Path, instant: list[str]
) -> None:
    names = {"ä": GOOD, "ö": GOOD, "a b": GOOD, "a+b": GOOD}
    _put(folder, **names)
    call = ("suite", folder, *QUICK, "--results", tmp_path / "kept")
    assert run(*call).code == 0
    assert len(instant) == len(list((tmp_path / "kept").iterdir())) == len(names)
    assert run(*call).code == 0
    assert len(instant) == len(names)


def test_problems_come_in_the_order_of_their_numbers(folder: Path) -> None:
    _put(folder, **{"10_b": GOOD, "9_a": GOOD, "1_c": GOOD, "helper": "x = 1\n"})
    assert [path.stem for path in work.problem_files(folder)] == ["1_c", "9_a", "10_b"]


def test_a_failure_is_a_page_of_its_own() -> None:
    report = gather.failure("p.py", "it fell over", "cpu", "auto")
    assert report.judgement == model.Judgement("failed", ("it fell over",))
    assert os.linesep not in report.judgement.reasons[0]


def test_no_name_and_no_unreadable_file_stops_the_rest(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [os.fsdecode(b"1_na\xffme"), "2_" + "\N{HIRAGANA LETTER A}" * 80, "3_locked", "4_\N{SUPERSCRIPT TWO}4"]
    _put(folder, **dict.fromkeys(names, GOOD))
    read = Path.read_bytes

    def locked(path: Path) -> bytes:
        if "locked" in path.name:
            raise PermissionError(13, "Permission denied")
        return read(path)

    def failing(requests: Sequence[Mapping[str, object]], _: float, told: Told) -> None:
        for place in range(len(requests)):
            told.keep(place, Ended(None, "it failed"))

    monkeypatch.setattr(Path, "read_bytes", locked)
    monkeypatch.setattr(work, "run_batch", failing)
    ran = run("suite", folder, *QUICK, "--results", tmp_path / "kept", "--json", tmp_path / "out.json")
    assert ran.code == 1, ran.err
    assert len(read(tmp_path / "out.json")) > 0
    assert len(list((tmp_path / "kept").iterdir())) == len(names)
    assert ran.out.count("it failed") == len(names)
    ran = run("report", tmp_path / "kept", tmp_path / "out.html")
    assert ran.code == 0, ran.err
