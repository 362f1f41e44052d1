"""The command line called in this process, and small problem files for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.kept_processes import kept_processes
from cli.problem_texts import GOOD, RESULT, Ran, Run, Write
from postlude.cli import main


@pytest.fixture(scope="session", autouse=True)
def _kept_processes() -> Iterator[None]:
    with kept_processes():
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # set by the commands for their children: undone afterwards
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")

    # For a program of its own: in the tests' process it would close /proc/self to them.
    monkeypatch.setattr("postlude.cli.judge.protect_this_process", lambda: None)

    def call(*arguments: str | Path) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert isinstance(ended.value.code, int)
        out, err = capsys.readouterr()
        return Ran(ended.value.code, out, err)

    return call


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(text: str, name: str = "problem.py") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return make


@pytest.fixture
def good(write: Write) -> Path:
    return write(GOOD)


@pytest.fixture
def candidate(write: Write) -> Callable[[str], Path]:
    """A ModelNew that returns the expression, everything else as in the good problem."""
    return lambda result: write(GOOD.replace("Model", "ModelNew").replace(RESULT, result), "candidate.py")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile's first call is slow; without a C++ compiler it is left out."""
    monkeypatch.setattr("postlude.hardware.cpp_compiler", lambda: None)
