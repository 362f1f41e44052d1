"""`postlude verify`: honest candidates pass, others do not, and what cannot be judged is not judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.problem_texts import GOOD, RESULT, Run, Write

Candidate = Callable[[str], Path]


def test_honest_candidate(run: Run, good: Path, candidate: Candidate) -> None:
    out = good.parent / "out.json"
    path = candidate("self.norm(self.conv(x)).clamp(min=0)")
    ran = run("verify", good, path, "--device", "cpu", "--json", out)
    assert ran.code == 0
    assert ran.out.splitlines()[0] == "Right (fp32)."
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["verdict"]["outcome"] == "right"
    assert data["verdict"]["errors"]["rms"] <= 2 * data["verdict"]["budget"]["rms"]


def test_gradients_on_request(run: Run, good: Path, candidate: Candidate) -> None:
    path = candidate("torch.relu(self.norm(self.conv(x.detach())))")
    assert run("verify", good, path, "--device", "cpu").code == 0
    ran = run("verify", good, path, "--device", "cpu", "--backward")
    assert ran.code == 1
    assert "gradient of input" in ran.out


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("torch.relu(self.conv(x))", "output: "),
        ("torch.zeros_like(self.conv(x))", "output: "),
        ("torch.relu(self.norm(self.conv(x)))[:, :1]", "shape"),
        ("undefined", "the candidate raised NameError: name 'undefined' is not defined"),
        ("exit(0)", "the candidate ends the process"),
    ],
)
def test_wrong_candidate(run: Run, good: Path, candidate: Candidate, result: str, reason: str) -> None:
    ran = run("verify", good, candidate(result), "--device", "cpu")
    assert ran.code == 1
    assert reason in ran.out
    assert ran.out.splitlines()[0].startswith("Wrong (")
    assert "Traceback" not in ran.err


def test_candidate_that_cannot_be_built_is_wrong(run: Run, good: Path, write: Write) -> None:
    text = GOOD.replace("Model", "ModelNew").replace("channels, groups", "channels")
    ran = run("verify", good, write(text, "candidate.py"), "--device", "cpu")
    assert ran.code == 1
    assert "ModelNew.__init__ raises TypeError" in ran.out


def test_candidate_with_other_parameters_is_wrong(run: Run, good: Path, write: Write) -> None:
    text = GOOD.replace("Model", "ModelNew").replace("self.norm", "self.group_norm")
    ran = run("verify", good, write(text, "candidate.py"), "--device", "cpu")
    assert ran.code == 1
    assert "norm.weight" in ran.out


def test_problem_that_cannot_tell(run: Run, write: Write, candidate: Candidate) -> None:
    flat = write(GOOD.replace(RESULT, "torch.zeros_like(x)"))
    ran = run("verify", flat, candidate("torch.zeros_like(x)"), "--device", "cpu")
    assert ran.code == 2
    assert ran.out.splitlines()[0].startswith("Cannot tell")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GOOD, "it has no class ModelNew (it has Model)."),
        ("import no_such_module_at_all\nclass ModelNew: pass\n", "an import fails"),
    ],
)
def test_candidate_that_is_none(run: Run, good: Path, write: Write, text: str, sentence: str) -> None:
    out = good.parent / "out.json"
    ran = run("verify", good, write(text, "candidate.py"), "--device", "cpu", "--json", out)
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.sentences) == 1
    assert sentence in ran.sentences[0]
    assert not out.exists()


def test_missing_files(run: Run, good: Path) -> None:
    nowhere = good.parent / "nowhere.py"
    for pair in ((nowhere, good), (good, nowhere)):
        ran = run("verify", *pair, "--device", "cpu")
        assert ran.code == 2
        assert ran.sentences == [f"postlude: {nowhere}: there is no such file."]
