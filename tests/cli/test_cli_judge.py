"""`postlude verify`: honest candidates pass, others do not, and what cannot be judged is not judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.problem_texts import GOOD as LARGE
from cli.problem_texts import RESULT, Run, Write
from postlude.check.exam import SelfCheck

Candidate = Callable[[str], Path]
GOOD = LARGE.replace("torch.rand(4, 3, 18, 34, 36)", "torch.rand(4, 3, 7, 6, 8)")


@pytest.fixture
def good(write: Write) -> Path:
    return write(GOOD)


@pytest.fixture
def candidate(write: Write) -> Candidate:
    """A ModelNew that returns the expression, everything else as in the good problem."""
    return lambda result: write(GOOD.replace("Model", "ModelNew").replace(RESULT, result), "candidate.py")


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


def test_what_a_candidate_does_stays_in_its_process(run: Run, good: Path, candidate: Candidate) -> None:
    out = good.parent / "out.json"
    crash = "(print('Right (fp32).'), __import__('ctypes').string_at(0))"
    ran = run("verify", good, candidate(crash), "--device", "cpu", "--json", out)
    assert ran.code == 1
    assert ran.out.splitlines()[:2] == [
        "Wrong (fp32).",
        "  failed: the candidate's process was ended by SIGSEGV during a call.",
    ]
    assert json.loads(out.read_text(encoding="utf-8"))["candidate_printed"].strip() == "Right (fp32)."


def test_a_hanging_candidate_ends_at_the_time_limit(run: Run, good: Path, candidate: Candidate) -> None:
    ran = run("verify", good, candidate("__import__('time').sleep(1000)"), "--device", "cpu", "--timeout", "0.5")
    assert ran.code == 1
    assert "failed: a call took longer than 0.5 seconds." in ran.out


def test_a_kernel_for_the_declared_shape_alone(run: Run, good: Path, candidate: Candidate) -> None:
    path = candidate("torch.relu(self.norm(self.conv(x))) if x.shape[0] == 4 else None")
    ran = run("verify", good, path, "--device", "cpu")
    assert ran.code == 1
    assert "(batch 1: 1×3×7×6×8; --declared-only leaves it out)" in ran.out
    assert run("verify", good, path, "--device", "cpu", "--declared-only", "--time-budget", "1").code == 0


def test_a_seed_repeats_a_run(run: Run, good: Path, candidate: Candidate) -> None:
    path = candidate("torch.relu(self.norm(self.conv(x.half().float())))")
    first, again = (run("verify", good, path, "--device", "cpu", "--seed", "7").out for _ in range(2))
    assert first == again
    assert "Seed 7." in first.splitlines()


def test_self_check_alone_and_beside_a_candidate(run: Run, write: Write) -> None:
    reference = write(GOOD)
    out = reference.parent / "out.json"
    ran = run("verify", reference, "--self-check", "--device", "cpu", "--json", out)
    assert ran.code == 0
    assert ran.out.startswith("Self-check: 4")
    assert "mutants of the reference rejected" in ran.out
    data = json.loads(out.read_text(encoding="utf-8"))["self_check"]
    assert (data["accepted"], data["left_out"]) == ([], 0)
    candidate = write(GOOD.replace("Model", "ModelNew"), "candidate.py")
    ran = run("verify", reference, candidate, "--self-check", "--device", "cpu")
    assert ran.code == 0
    assert ran.out.splitlines()[0] == "Right (fp32)."
    assert "Self-check: " in ran.out


def test_points_that_accept_a_mutant_cannot_tell(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, candidate = write(GOOD), write(GOOD.replace("Model", "ModelNew"), "candidate.py")
    accepting = SelfCheck((), ("relu: left out",), (), 0)
    monkeypatch.setattr("postlude.cli.judge.self_check", lambda exam, progress: accepting)
    ran = run("verify", reference, candidate, "--self-check", "--device", "cpu")
    assert ran.code == 2
    assert ran.out.splitlines()[:2] == [
        "Cannot tell (fp32).",
        "  these points would also accept mutants of the reference: relu: left out",
    ]


def test_without_a_candidate_there_is_only_the_self_check(run: Run, good: Path) -> None:
    ran = run("verify", good, "--device", "cpu")
    assert ran.code == 2
    assert ran.sentences == ["postlude: verify needs a candidate, or --self-check to test the points on mutants only."]


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


def test_a_kernel_that_finds_no_gpu_is_told_what_it_needs(run: Run, good: Path, candidate: Candidate) -> None:
    says = "(_ for _ in ()).throw(RuntimeError('0 active drivers ([]). There should only be one.'))"
    ran = run("verify", good, candidate(f"next({says})"), "--device", "cpu")
    assert ran.code == 1
    assert "Triton finds no GPU for it" in ran.out


def test_an_argument_that_cannot_be_sent_is_one_sentence(run: Run, write: Write, candidate: Candidate) -> None:
    text = GOOD.replace("channels, groups):", "channels, groups, kind=None):", 1)
    text = text.replace("return [8, 4]", "return [8, 4, nn.ReLU]")
    ran = run("verify", write(text), candidate("x"), "--device", "cpu")
    sentence = "an argument of the constructor is or holds a value of type type, which cannot be sent to a candidate."
    assert (ran.code, ran.err.splitlines()[-1]) == (2, f"postlude: {sentence}")
