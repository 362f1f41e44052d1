"""Runs one problem of a suite in a process of its own, and says in one sentence how that went."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from postlude.report.decode import decode
from postlude.report.model import Report

TAIL_BYTES = 16_384  # of what it prints
CHUNK = 65_536


class Ended(Exception):  # noqa: N818 - it says how the process ended
    """The problem gave no result; the message says why."""


def run_problem(request: dict[str, Any], limit_s: float, progress: Callable[[str], None]) -> Report:
    """The report on one problem, or `Ended`. Whatever the problem does ends with its process, at the limit at last."""
    with tempfile.TemporaryDirectory(prefix="postlude-suite-") as folder:
        target = Path(folder) / "result.json"
        command = [sys.executable, "-m", "postlude.cli.suite_child", json.dumps(request), str(target)]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        tail = _Tail(child.stderr, progress)
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Ended(f"it took longer than {limit_s:g} s and was ended") from None
        finally:
            _end(child)
            tail.join()
        return _result(target, code, tail.last_line)


def _result(target: Path, code: int, last: str) -> Report:
    if not target.exists():
        said = f"; it said last: {last}" if last else ""
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise Ended(f"its process ended with {how} and no result{said}")
    try:
        found = json.loads(target.read_text(encoding="utf-8"))
        if "error" in found:
            raise Ended(str(found["error"]).rstrip("."))
        return decode(found["report"])
    except (ValueError, KeyError, TypeError) as error:
        raise Ended(f"its result cannot be read ({error})") from error


def _end(child: subprocess.Popen[bytes]) -> None:
    """The process and whatever it started in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class _Tail:
    """Reads what a process prints so that it never waits, keeps the end, and passes each line on."""

    def __init__(self, stream: IO[bytes] | None, progress: Callable[[str], None]) -> None:
        assert stream is not None
        self.stream, self.progress, self.kept = stream, progress, b""
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    @property
    def last_line(self) -> str:
        lines = [line for line in self.kept.decode("utf-8", "replace").splitlines() if line.strip()]
        # Our own lines of progress end with an ellipsis and are no message.
        said = [line for line in lines if not (line.startswith("postlude: ") and line.endswith("…"))]
        return said[-1].strip()[:200] if said else ""

    def join(self) -> None:
        self.thread.join(5.0)

    def _read(self) -> None:
        with self.stream:
            while chunk := self.stream.read1(CHUNK):  # type: ignore[attr-defined]
                self.kept = (self.kept + chunk)[-TAIL_BYTES:]
                line = self.kept.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
                if line.startswith("postlude: ") and line.endswith("…"):
                    self.progress(line.removeprefix("postlude: ").removesuffix(" …"))
