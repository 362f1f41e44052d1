"""One problem of a suite in a process of its own: it prepares, says so, waits for its turn, and leaves a result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from postlude.report.decode import decode
from postlude.report.model import Report

COMMAND = [sys.executable, "-m", "postlude.cli.suite_child"]
TAIL_BYTES = 16_384  # of what it prints
CHUNK = 65_536
READY, GO = b"ready\n", b"go\n"
PREPARING, WAITING, OVER = "preparing", "ready", "over"
# Of a card, of a library's workspace on it, and of the machine itself.
NO_MEMORY = ("out of memory", "outofmemory", "alloc_failed", "can't allocate memory", "memoryerror", "signal sigkill")


@dataclass(frozen=True)
class Ended:
    """How a problem ended: with a report, or with the reason why there is none."""

    report: Report | None
    reason: str = ""
    times: Mapping[str, list[float]] = field(default_factory=dict)  # when it prepared and was timed, by its own clock
    seconds: float = 0.0  # of its own: without its waiting
    lacked_memory: bool = False  # altogether, or for a part that its report leaves out


class Child:
    """The process of one problem. Whatever the problem does ends with it, at the limit at last."""

    def __init__(self, request: Mapping[str, Any], limit_s: float, progress: Callable[[str], None]) -> None:
        self.request, self.limit_s, self.progress = request, limit_s, progress
        self.state = PREPARING
        self.outcome: Ended | None = None
        self.own_seconds = 0.0
        self.since: float | None = None  # its own time runs since then
        self.is_heard = True  # until it closes its end of the line
        self.cleanup = contextlib.ExitStack()

    def start(self, environment: Mapping[str, str]) -> None:
        folder = self.cleanup.enter_context(tempfile.TemporaryDirectory(prefix="postlude-suite-"))
        self.target = Path(folder) / "result.json"
        self.line, theirs = (self.cleanup.enter_context(one) for one in socket.socketpair())
        request = json.dumps({**self.request, "started": time.time()})
        self.since = time.monotonic()
        self.process = subprocess.Popen(
            [*COMMAND, request, str(self.target), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, **environment},
        )
        self.tail = _Tail(self.process.stderr, self.progress)
        self.cleanup.callback(self._kill)
        theirs.close()

    def look(self, may_speak: bool) -> None:
        """Notices that it is ready, that it ended, or that its time is over; `may_speak`: something is on the line."""
        said = self.line.recv(CHUNK) if may_speak else None
        self.is_heard = said != b""
        if said == READY:
            self._stop_clock()
            self.state = WAITING
        elif self.process.poll() is not None:
            self._finish()
        elif self._spent() > self.limit_s:
            self._give_up()

    def time(self) -> None:
        """Its turn: returns when it has ended."""
        self.since = time.monotonic()
        with contextlib.suppress(ConnectionError):  # it died while it waited; how, its exit code says
            self.line.sendall(GO)
        try:
            self.process.wait(max(self.limit_s - self.own_seconds, 0.0))
        except subprocess.TimeoutExpired:
            self._give_up()
        else:
            self._finish()

    def end(self) -> None:
        """Whatever it is doing; safe to call twice."""
        self._stop_clock()
        self.state = OVER
        self.cleanup.close()

    def _spent(self) -> float:
        return self.own_seconds + (0.0 if self.since is None else time.monotonic() - self.since)

    def _stop_clock(self) -> None:
        self.own_seconds, self.since = self._spent(), None

    def _give_up(self) -> None:
        self._stop_clock()
        self.outcome = Ended(None, f"it took longer than {self.limit_s:g} s and was ended", seconds=self.own_seconds)
        self.end()

    def _finish(self) -> None:
        self._stop_clock()
        self._kill()
        self.outcome = _outcome(self.target, self.process.returncode, self.tail.last_line, self.own_seconds)
        self.end()

    def _kill(self) -> None:
        """The process and whatever it started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.tail.join()


def _outcome(target: Path, code: int, last: str, seconds: float) -> Ended:
    if not target.exists():
        said = f"; it said last: {last}" if last else ""
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = f"its process ended with {how} and no result{said}"
        return Ended(None, reason, {}, seconds, _lacks_memory(reason))
    text = target.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        times, lacked = found.get("times", {}), _lacks_memory(text)
        if "error" in found:
            return Ended(None, str(found["error"]).rstrip("."), times, seconds, lacked)
        return Ended(decode(found["report"]), "", times, seconds, lacked)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Ended(None, f"its result cannot be read ({error})", {}, seconds)


def _lacks_memory(text: str) -> bool:
    lower = text.lower()
    return any(word in lower for word in NO_MEMORY)


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
