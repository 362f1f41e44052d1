"""`postlude report`, and `--report` of `postlude optimize`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cli.problem_texts import GOOD, RESULT, Run, Write
from postlude.report import model, read, write
from report.sample import FULL

H200 = Path(__file__).parents[2] / "benchmarks" / "results" / "h200.csv"


def test_a_page_from_json(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "in.json", FULL)
    ran = run("report", tmp_path / "in.json", tmp_path / "out.html")
    assert ran.code == 0
    assert "Right in fp32" in ran.out
    assert "9.42×" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_a_page_from_records(run: Run, tmp_path: Path) -> None:
    assert run("report", H200, tmp_path / "out.html").code == 0
    assert "How many are faster" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_a_page_from_a_folder_of_suite(run: Run, tmp_path: Path) -> None:
    """Problem 10 comes after problem 2."""
    folder = tmp_path / "postlude-suite"
    folder.mkdir()
    for name in ("10_b", "2_a"):
        write(folder / f"{name}.json", dataclasses.replace(FULL, title=name))
    assert run("report", folder, tmp_path / "out.json").code == 0
    assert [one.title for one in read(tmp_path / "out.json")] == ["2_a", "10_b"]
    (folder / "other.json").write_text("{}")
    ran = run("report", folder, tmp_path / "out.json")
    assert ran.code == 2
    assert "this folder is not one of suite's results; pass the --json" in ran.sentences[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.json", "out.html"], "there is no such file"),
        (["none.csv", "out.html"], "there is no such file"),
        (["bad.csv", "out.html"], "it is not a record file"),
        (["bad.json", "out.html"], "it cannot be read as JSON"),
        ([".", "out.html"], "this folder is not one of suite's results; pass the --json of bench or suite"),
        (["bad.json", "out.pdf"], "a report is written as .html, .json or .csv."),
        (["bad.json", "none/out.html"], "does not exist"),
    ],
)
def test_one_sentence_for_what_cannot_be(run: Run, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    for name in ("bad.csv", "bad.json"):
        (tmp_path / name).write_text("a,b\n1")
    ran = run("report", *(tmp_path / argument for argument in arguments))
    assert ran.code == 2
    assert len(ran.sentences) == 1
    assert sentence in ran.sentences[0]


@pytest.mark.usefixtures("fresh_dynamo")
def test_optimize_writes_what_it_found(run: Run, good: Path) -> None:
    path = good.parent / "out.json"
    assert run("optimize", good, "--device", "cpu", "--report", path).code == 0
    (report,) = read(path)
    assert report.title == good.name
    assert report.judgement.outcome == "right"
    (site,) = report.sites
    assert site.is_fused
    assert site.before_bytes == sum(step.bytes or 0 for step in site.before)
    assert site.after_bytes is not None
    assert site.after_bytes < site.before_bytes  # type: ignore[operator]
    assert report.races == ()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_that_nothing_was_fused_in(run: Run, write: Write) -> None:
    path = write(GOOD.replace(RESULT, "x.square()"))
    out = path.parent / "out.json"
    assert run("optimize", path, "--device", "cpu", "--report", out).code == 1
    (report,) = read(out)
    assert report.judgement.outcome == model.DECLINED
    assert run("optimize", path, "--device", "cpu", "--report", path.parent / "out.txt").code == 2
