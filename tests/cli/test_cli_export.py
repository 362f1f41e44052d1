"""`postlude optimize -o` and `verify --like-kernelbench`, called as a user calls them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.problem_texts import GOOD, NOTHING, RESULT, Run, Write
from postlude.cli import export as command
from postlude.export.export_model import Export

SMALL = GOOD.replace("torch.rand(4, 3, 18, 34, 36)", "torch.rand(2, 3, 6, 7, 8)")

UNBUILT = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x.square() + x

def get_inputs():
    return [torch.randn(2, 3, 4, 4)]

def get_init_inputs():
    return []
"""


@pytest.fixture(autouse=True)
def _small_chains_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pays on a GPU takes minutes to verify on a CPU."""
    honest = command.export_model
    monkeypatch.setattr(command, "export_model", lambda *a, **settings: honest(*a, **settings, even_if_slower=True))


def test_writes_a_verified_file(run: Run, write: Write, tmp_path: Path) -> None:
    out, data = tmp_path / "model_new.py", tmp_path / "data.json"
    ran = run("optimize", write(SMALL), "-o", out, "--device", "cpu", "--json", data)
    assert ran.code == 0, ran.err
    text = out.read_text("utf-8")
    assert "class ModelNew(nn.Module):" in text
    assert "not measured here: no GPU" in ran.out
    assert f"{len(text.splitlines())} lines" in ran.out
    assert "on a CPU, where it runs PyTorch's operators" in ran.out
    written = json.loads(data.read_text("utf-8"))
    assert written["verified"] is True
    assert written["verdict"]["outcome"] == "right"
    assert written["readability"]["lines"] == len(text.splitlines())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".model_new")] == []


def test_says_when_it_did_not_verify(run: Run, write: Write, tmp_path: Path) -> None:
    ran = run("optimize", write(SMALL), "-o", tmp_path / "out.py", "--no-verify", "--device", "cpu")
    assert ran.code == 0
    assert "not verified (--no-verify)" in ran.out
    ran = run("optimize", write(SMALL), "--no-verify")
    assert ran.code == 2
    assert "apply to the file that -o writes" in ran.err


def test_the_models_own_convolution(run: Run, write: Write, tmp_path: Path) -> None:
    out = tmp_path / "out.py"
    ran = run("optimize", write(SMALL), "-o", out, "--convolution", "pytorch", "--device", "cpu")
    assert ran.code == 0, ran.err
    assert "        x = self.conv(x)\n        tensors = (x, " in out.read_text("utf-8")
    ran = run("optimize", write(SMALL), "-o", out, "--convolution", "cudnn", "--device", "cpu")
    assert ran.code == 2
    assert "--convolution cudnn is unknown; use auto or pytorch." in ran.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (NOTHING, "there is no chain in this model"),
        (UNBUILT, "there is no chain in this model"),
        (SMALL.replace(RESULT, f"{RESULT} if x.sum() > 0 else x"), "one straight line of calls"),
    ],
)
def test_an_impossible_file_is_one_sentence(run: Run, write: Write, tmp_path: Path, text: str, says: str) -> None:
    out = tmp_path / "out.py"
    out.write_text("before", encoding="utf-8")
    ran = run("optimize", write(text), "-o", out, "--device", "cpu")
    assert ran.code == 1
    assert len(ran.sentences) == 1
    assert says in ran.sentences[0]
    assert out.read_text("utf-8") == "before"


def test_a_wrong_file_is_not_written(run: Run, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: an exporter that forgets the relu."""
    honest: Callable[..., Export] = command._made

    def forgetful(*arguments: object) -> Export:
        made = honest(*arguments)
        text = made.text.replace("return torch.relu(self.norm(self.conv(x)))", "return self.norm(self.conv(x))")
        assert text != made.text
        return Export(text, made.chains, made.left)

    monkeypatch.setattr(command, "_made", forgetful)
    out = tmp_path / "out.py"
    out.write_text("before", encoding="utf-8")
    ran = run("optimize", write(SMALL), "-o", out, "--device", "cpu")
    assert ran.code == 1
    assert "Nothing was written" in ran.out
    assert out.read_text("utf-8") == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"out.py", "problem.py"}


def test_the_problem_itself_is_not_overwritten(run: Run, write: Write) -> None:
    problem = write(SMALL)
    ran = run("optimize", problem, "-o", problem, "--device", "cpu")
    assert ran.code == 2
    assert "this is the problem itself" in ran.err


def test_kernelbenchs_rule(run: Run, good: Path, candidate: Callable[[str], Path]) -> None:
    right = run("verify", good, candidate(RESULT), "--like-kernelbench")
    assert right.code == 0
    assert right.out.count("trial ") == 5
    assert "weaker than `postlude verify`" in right.out
    wrong = run("verify", good, candidate("torch.relu(self.norm(self.conv(x))) + 1e-3"), "--like-kernelbench")
    assert wrong.code == 1
    assert "differs by more than 0.0001" in wrong.out


def test_kernelbenchs_rule_is_weaker(run: Run, write: Write, candidate: Callable[[str], Path]) -> None:
    """γ and β are 1 and 0 at the start: a candidate that never reads them passes there, and not here."""
    good = write(SMALL, "small.py")
    without = "torch.relu(torch.nn.functional.group_norm(self.conv(x), 4))"
    assert run("verify", good, candidate(without), "--like-kernelbench").code == 0
    assert run("verify", good, candidate(without)).code == 1
    shape = run("verify", good, candidate("x"), "--like-kernelbench")
    assert shape.code == 1
    assert "the result has shape" in shape.out
