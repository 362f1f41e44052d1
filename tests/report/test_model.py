"""A report survives its JSON, refuses what is none, and never holds a speed-up of something wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from postlude.errors import PostludeError
from postlude.report import model, read, write
from postlude.report.decode import decode
from postlude.report.write import to_json
from report.sample import FULL, hostile


@pytest.mark.parametrize("report", [FULL, hostile()], ids=["full", "hostile"])
def test_json_holds_the_whole_report(report: model.Report, tmp_path: Path) -> None:
    path = write(tmp_path / "out.json", report)
    assert read(path) == [report]


def test_infinite_errors_survive_json(tmp_path: Path) -> None:
    wrong = model.Judgement("wrong", (), "fp32", (model.Quantity("output", "wrong", model.Errors(math.inf, math.inf)),))
    report = dataclasses.replace(FULL, judgement=wrong)
    text = write(tmp_path / "out.json", report).read_text(encoding="utf-8")
    assert "Infinity" not in text
    assert read(tmp_path / "out.json") == [report]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema": 7}, "not a report of form"),
        ({"title": 3}, "report.title is not of type str"),
        ({"races": {}}, "report.races is not a list"),
        ({"environment": {"a": 1}}, "report.environment is not a table of texts"),
        ({"judgement": {"outcome": "splendid"}}, "'splendid' is not a verdict"),
        ({"judgement": {}}, "report.judgement has no outcome"),
        ({"roofline": {"operations": "x"}}, "report.roofline.operations is not of type int"),
    ],
)
def test_what_is_no_report_is_refused(change: dict[str, object], sentence: str) -> None:
    (data,) = json.loads(json.dumps(to_json([FULL])))["reports"]
    with pytest.raises(ValueError, match=sentence):
        decode({**data, **change})


def test_a_wrong_variant_cannot_have_a_speed_up() -> None:
    wrong = dataclasses.replace(FULL.variants[2], judgement=model.Judgement("wrong", ("zeros",)))
    with pytest.raises(ValueError, match="postlude is not right, so it has no speed-up"):
        dataclasses.replace(FULL, variants=(*FULL.variants[:2], wrong))


def test_a_judged_variant_without_a_verdict_cannot_either() -> None:
    unknown = dataclasses.replace(FULL.variants[2], judgement=None)
    with pytest.raises(ValueError, match="no speed-up"):
        dataclasses.replace(FULL, variants=(*FULL.variants[:2], unknown))


def test_files_that_are_none(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"a": 1}')
    for path, sentence in (
        (tmp_path / "none.json", "there is no such file"),
        (other, "it holds no report"),
    ):
        with pytest.raises(PostludeError, match=sentence):
            read(path)
    with pytest.raises(PostludeError, match=r"written as \.html, \.json or \.csv"):
        write(tmp_path / "out.pdf", FULL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json"]
