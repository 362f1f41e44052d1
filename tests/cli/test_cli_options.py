"""Options: what they do, and one sentence for each value that cannot be."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import postlude
from cli.problem_texts import Run, Write
from postlude.cli import chains, frame


def test_version(run: Run) -> None:
    ran = run("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"postlude {postlude.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_names_every_command(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.err) == (0, "")
    assert all(name in ran.out for name in ("optimize", "verify", "bench", "explain", "demo", "doctor"))


def test_help_does_not_load_torch() -> None:
    program = "import sys, postlude.cli; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["optimise"], "No such command 'optimise'. Did you mean 'optimize'? See postlude --help."),
        (["optimize"], "Missing argument"),
        (["optimize", "FILE", "--fast"], "No such option: --fast"),
        (["optimize", "FILE", "--device", "potato"], "--device potato is unknown; use cpu or cuda."),
        (
            ["explain", "FILE", "--precision", "foo"],
            "precision 'foo' is unknown; use one of auto, fp32, tf32.",
        ),
        (
            ["bench", "FILE", "--device", "cpu", "--precision", "tf32"],
            "precision 'tf32' exists only on NVIDIA GPUs",
        ),
        (["optimize", "FILE", "--train"], "--train and --no-verify apply to the file that -o writes; add -o."),
        (["optimize", "FILE", "--training"], "--train and --no-verify apply to the file that -o writes; add -o."),
        (["verify", "FILE", "FILE", "--seeds", "two"], "Invalid value for '--seeds'"),
        (["verify", "FILE", "FILE", "--seeds", "2"], "Invalid value for '--seeds'"),
        (["verify", "FILE", "FILE", "--seed", str(2**63)], "Invalid value for '--seed'"),
        (["verify", "FILE", "FILE", "--timeout", "inf"], "Invalid value for '--timeout'"),
        (["suite", "FOLDER", "--limit", "1e18"], "Invalid value for '--limit'"),
        (["optimize", "FILE", "-o", "FOLDER/new.py", "--report", "FOLDER/page.html"], "use only one of them."),
        (["bench", "FILE", "--rounds", "0"], "Invalid value for '--rounds'"),
        (["bench", "FILE", "--seconds", "-1"], "Invalid value for '--seconds'"),
        (["bench", "FILE", "--csv", "FOLDER"], "this is a directory; name a file to write to."),
        (["bench", "FILE", "--csv", "FILE"], "this file exists and is not a record file"),
        (["optimize", "FILE", "--json", "FOLDER"], "this is a directory; name a file to write to."),
        (["optimize", "FILE", "--json", "FOLDER/none/out.json"], "does not exist."),
        (["doctor", "--json", "FOLDER/none/out.json"], "does not exist."),
        (["explain", "FILE", "--json", "FILE"], "would overwrite a Python file with results; name another file."),
    ],
)
def test_one_sentence_for_what_cannot_be(run: Run, good: Path, arguments: list[str], sentence: str) -> None:
    places = {"FILE": str(good), "FOLDER": str(good.parent)}
    for word, place in places.items():
        arguments = [argument.replace(word, place) for argument in arguments]
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert len(ran.sentences) == 1
    assert ran.sentences[0].startswith("postlude: ")
    assert sentence in ran.sentences[0]
    assert list(good.parent.iterdir()) == [good]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu(run: Run, good: Path) -> None:
    ran = run("optimize", good, "--device", "cuda")
    assert ran.code == 2
    assert ran.err == "postlude: --device cuda needs an NVIDIA GPU that this PyTorch can use; there is none here.\n"


def test_an_interrupt_is_one_word(run: Run, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chains, "optimize", interrupted)
    ran = run("optimize", good, "--device", "cpu")
    assert (ran.code, ran.out, ran.err) == (130, "", "postlude: interrupted\n")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs POSIX signals")
def test_a_kill_is_an_interrupt(write: Write, tmp_path: Path) -> None:
    began = tmp_path / "began"
    waiting = write(f"import pathlib, time\npathlib.Path({str(began)!r}).touch()\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "postlude", "explain", str(waiting), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while not began.exists() and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
        said, _ = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, b"postlude: interrupted\n")


def test_under_nohup_a_closed_terminal_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(signal, "getsignal", {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_IGN}.get)
    monkeypatch.setattr(signal, "signal", lambda number, _: taken.append(number))
    frame.end_like_an_interrupt()
    assert taken == [signal.SIGTERM]


def test_a_mistake_of_ours_is_one_sentence_too(run: Run, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("first\nsecond")

    monkeypatch.setattr(chains, "optimize", broken)
    ran = run("optimize", good, "--device", "cpu")
    assert (ran.code, ran.err) == (2, "postlude: unexpected AssertionError: first (--debug shows where).\n")
    assert "Traceback" in run("optimize", good, "--device", "cpu", "--debug").err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize(("where", "code", "said"), [("> /dev/full", 2, "No space left on device."), (">&-", 0, "")])
def test_help_that_cannot_be_written_is_no_traceback(where: str, code: int, said: str) -> None:
    line = f"{shlex.quote(sys.executable)} -m postlude --help {where}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.strip().removeprefix("postlude: ") == said
