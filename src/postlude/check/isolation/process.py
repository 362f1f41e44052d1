"""The verifier's end of a candidate's process: starts it, sends requests, and ends it whatever it does."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postlude.check.isolation.buffers import Buffer
from postlude.check.isolation.environment import (
    CODE_FOLDER,
    WORKING_FOLDER,
    OutputReader,
    bytes_under,
    make_folders,
    remove,
)
from postlude.check.isolation.wire import (
    LENGTH_BYTES,
    MAX_MESSAGE_BYTES,
    Layout,
    WireError,
    check_fields,
    flatten,
    lay_out,
    parse_layout,
    parse_message,
    rebuild,
)
from postlude.errors import PostludeError

CHILD = Path(__file__).with_name("child.py")
FOLDER_PREFIX = "postlude-candidate-"
FOLDER_CHECK_S = 1.0  # between checks of how much the candidate has written, while waiting for it
CLOSED = "it was closed"
MAX_REASON = 2000
EXIT_S = 1.0  # for a process that has closed its end to exit


class CandidateFailed(PostludeError):  # noqa: N818 - it says what the candidate did
    """The candidate did not answer; the message is "failed: …", and `details` a traceback where it raised."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(f"failed: {reason.rstrip('.')}.")
        self.reason = reason
        self.details = details


class _EndedError(Exception):
    """The other end is closed."""


@dataclass(frozen=True)
class Limits:
    """What a candidate may use; times are per request."""

    start_s: float = 120.0
    call_s: float = 60.0
    grace_s: float = 0.5  # between SIGTERM and SIGKILL
    output_bytes: int = 1 << 30  # of tensors in one answer
    said_bytes: int = 64 << 10  # of its output that is kept
    file_bytes: int = 1 << 30  # of one file that it writes
    folder_bytes: int = 4 << 30  # of all files in its folder


@dataclass(frozen=True)
class Reply:
    value: Any
    layout: Layout
    tensors: tuple[Tensor, ...]
    seconds: float  # by our clock, from before the request was sent until after the answer had arrived
    changed: tuple[int, ...]  # which of the sent tensors were written to


class Running:
    """One process with its folder, its connection and its output."""

    def __init__(self, limits: Limits) -> None:
        if not hasattr(socket, "send_fds") or os.name != "posix":
            raise PostludeError("A candidate can be run in a process of its own on Linux and macOS only.")
        self.limits = limits
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self.ending: str | None = None  # why the process has ended
        self._connection, theirs = socket.socketpair()
        try:
            self._start(theirs, make_folders(self.folder, os.environ))
        except BaseException:
            self._connection.close()
            remove(self.folder)
            raise

    def _start(self, theirs: socket.socket, variables: dict[str, str]) -> None:
        packages = Path(torch.__file__).parent.parent
        command = [sys.executable, "-I", "-u", str(CHILD), str(self.limits.file_bytes), str(packages)]
        with theirs:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder / WORKING_FOLDER,
                env=variables,
                stdin=theirs.fileno(),  # the number of another descriptor could tell two phases apart
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own process group, so that what it starts ends with it
            )
        assert self.process.stdout is not None
        self._output = OutputReader(self.process.stdout.fileno(), self.limits.said_bytes)

    @property
    def said(self) -> str:
        return self._output.text

    def copy_in(self, file: Path) -> Path:
        """Copies a file into the candidate's folder, which holds nothing else."""
        try:
            return Path(shutil.copyfile(file, self.folder / CODE_FOLDER / file.name))
        except OSError as error:
            raise CandidateFailed(f"{file} cannot be read ({error.strerror or error})") from None

    def ask(
        self,
        do: str,
        limit_s: float,
        value: dict[str, Any],
        doing: str,
        watched: bool = False,
        signal_s: float | None = None,
    ) -> Reply:
        """One request and its answer. Any failure other than an exception of the candidate's own ends the process.

        With `watched`, sent tensors are compared afterwards to see whether they were written to. With `signal_s`, the
        first byte that was sent becomes 1 after so many seconds.
        """
        if self.ending is not None:
            raise CandidateFailed(f"the candidate's process is gone: {self.ending}")
        tree, tensors = flatten(value)
        deadline = time.monotonic() + limit_s
        try:
            return self._exchange(do, tree, tensors, deadline, watched, signal_s)
        except CandidateFailed:
            raise
        except WireError as error:
            reason = f"the candidate's process sent an answer that {error}"
        except TimeoutError:
            reason = f"{doing} took longer than {limit_s:g} seconds"
        except _TooMuchWrittenError:
            reason = f"the candidate wrote more than {self.limits.folder_bytes} bytes into its folder"
        except (ConnectionError, _EndedError):
            reason = f"{self._how_it_ended()} during {doing}"
        except BaseException:
            self.close("it was interrupted")
            raise
        self.close(reason)
        raise CandidateFailed(reason)

    def _exchange(
        self,
        do: str,
        tree: Any,
        tensors: Sequence[Tensor],
        deadline: float,
        watched: bool,
        signal_s: float | None,
    ) -> Reply:
        layout = lay_out(tensors)
        number = secrets.randbits(60)  # random, so that an answer cannot be sent before its request
        request = {"request": number, "do": do, "value": tree, **layout.as_json()}
        with Buffer(layout.size) as buffer:
            buffer.write(layout, tensors)
            with buffer.signalled(signal_s):
                begin = time.perf_counter()
                self._send(request, buffer if layout.size else None, deadline)
                answer = self._receive(number, deadline)
                seconds = time.perf_counter() - begin
            check_fields(answer, {"reply": int, "value": object, "tensors": list, "size": int})
            announced = parse_layout({key: answer[key] for key in ("tensors", "size")}, self.limits.output_bytes)
            found = self._fetch(announced, number, deadline)
            changed = tuple(buffer.changed(layout, tensors)) if watched else ()
            return Reply(rebuild(answer["value"], found), announced, found, seconds, changed)

    def _fetch(self, layout: Layout, number: int, deadline: float) -> tuple[Tensor, ...]:
        with Buffer(layout.size) as buffer:
            if layout.size:
                self._send({"buffer": number}, buffer, deadline)
                check_fields(self._receive(number, deadline), {"reply": int, "written": bool})
            return tuple(buffer.read(spec) for spec in layout.specs)

    def _send(self, message: dict[str, Any], buffer: Buffer | None, deadline: float) -> None:
        data = json.dumps(message).encode()
        self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
        prefix = len(data).to_bytes(LENGTH_BYTES, "big")
        if buffer is None:
            self._connection.sendall(prefix)
        else:
            socket.send_fds(self._connection, [prefix], [buffer.descriptor])
        self._connection.sendall(data)

    def _receive(self, number: int, deadline: float) -> dict[str, Any]:
        size = int.from_bytes(self._read(LENGTH_BYTES, deadline), "big")
        if size > MAX_MESSAGE_BYTES:
            raise WireError(f"is {size} bytes long where {MAX_MESSAGE_BYTES} are allowed")
        message = parse_message(self._read(size, deadline))
        if type(message.get("reply")) is not int or message["reply"] != number:
            raise WireError("belongs to no question")
        if "raised" in message:
            check_fields(message, {"reply": int, "raised": str, "details": str})
            # One line without control characters: it goes to a terminal.
            shown = "".join(letter if letter.isprintable() else " " for letter in message["raised"])
            reason = " ".join(shown.split())[:MAX_REASON]
            raise CandidateFailed(reason or "the candidate raised an error", message["details"])
        return message

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(min(left, FOLDER_CHECK_S))
            try:
                # A plain recv: descriptors that a candidate sends along are closed by the system.
                part = self._connection.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                if bytes_under(self.folder, self.limits.folder_bytes) > self.limits.folder_bytes:
                    raise _TooMuchWrittenError from None
                continue
            if not part:
                raise _EndedError
            data += part
        return bytes(data)

    def _how_it_ended(self) -> str:
        code = self._exit_code(EXIT_S)
        if code is None:
            return "the candidate closed its connection to the verifier"
        if code >= 0:
            return f"the candidate's process ended with exit code {code}"
        try:
            return f"the candidate's process was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"the candidate's process was ended by signal {-code}"

    def _exit_code(self, wait_s: float) -> int | None:
        """How it ended, or None if it still runs after `wait_s`."""
        until = time.monotonic() + wait_s
        while True:
            code = self._code_now()
            if code is not None or time.monotonic() >= until:
                return code
            time.sleep(0.005)

    def _code_now(self) -> int | None:
        if not hasattr(os, "waitid"):
            return self.process.poll()
        try:
            # It stays a zombie, so that no other process can get its group's number before the group is ended.
            found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # other code in this process reaps all children
            return self.process.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def close(self, why: str = CLOSED) -> None:
        """Ends the process and its group and removes its folder; may be called twice."""
        if self.ending is not None:
            return
        self.ending = why
        self._connection.close()
        if why != CLOSED or self._exit_code(self.limits.grace_s) is None:
            self._signal(signal.SIGTERM)
            self._exit_code(self.limits.grace_s)
        self._signal(signal.SIGKILL)
        self.process.wait()
        self._output.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        remove(self.folder)

    def _signal(self, which: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, which)


class _TooMuchWrittenError(Exception):
    """The candidate's folder is fuller than it may be."""
