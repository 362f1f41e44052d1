"""`postlude bench`: what is timed, what may be shown, what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.problem_texts import Run
from postlude.check import records
from postlude.hardware import cpp_compiler

FEW = ("--device", "cpu", "--rounds", "3", "--seconds", "0.5")
Candidate = Callable[[str], Path]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.skipif(cpp_compiler() is None, reason="torch.compile needs a C++ compiler")
def test_three_variants_and_an_honest_candidate(run: Run, good: Path, candidate: Candidate) -> None:
    out, csv = good.parent / "out.json", good.parent / "rows.csv"
    path = candidate("self.norm(self.conv(x)).clamp(min=0)")
    ran = run("bench", good, path, *FEW, "--json", out, "--csv", csv)
    assert ran.code == 0
    data = json.loads(out.read_text(encoding="utf-8"))
    names = {"eager", "torch.compile", "postlude", "candidate"}
    assert set(data["seconds"]) == names
    assert set(data["times_eager"]) == names - {"eager"}
    assert all(timing["low"] <= timing["median"] <= timing["high"] for timing in data["seconds"].values())
    rows = records.read(csv)
    assert {row.variant for row in rows} == names
    assert {(row.mode, row.shape) for row in rows} == {("inference", "4×3×18×34×36")}


@pytest.mark.usefixtures("no_compiler")
def test_wrong_candidate_gets_no_speed_up(run: Run, good: Path, candidate: Candidate) -> None:
    out = good.parent / "out.json"
    ran = run("bench", good, candidate("torch.zeros_like(self.conv(x))"), *FEW, "--json", out)
    assert ran.code == 1
    assert "The candidate failed verification: it was not timed." in ran.out
    assert "no C++ compiler here" in ran.out
    data = json.loads(out.read_text(encoding="utf-8"))
    assert set(data["seconds"]) == {"eager", "postlude"}
    assert set(data["times_eager"]) == {"postlude"}
    assert data["verdicts"]["candidate"]["outcome"] == "wrong"


@pytest.mark.usefixtures("no_compiler")
def test_training(run: Run, good: Path) -> None:
    out = good.parent / "out.json"
    assert run("bench", good, "--train", *FEW, "--json", out).code == 0
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["mode"] == "train"
    assert set(data["seconds"]) == {"eager", "postlude"}
