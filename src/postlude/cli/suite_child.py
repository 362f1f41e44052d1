"""One problem of a suite, in the process that it has to itself: one JSON file comes out of it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from postlude.cli.frame import Request, quiet, settled
from postlude.cli.suite_process import GO, READY
from postlude.errors import PostludeError, first_line
from postlude.files import write_whole


class Turn:
    """Says that the problem is prepared and waits to be told to go on; knows when that was."""

    def __init__(self, line: socket.socket, started: float) -> None:
        line.set_inheritable(False)  # what the problem starts has no part in it
        self.line, self.marks = line, [started]

    def wait(self) -> None:
        _leave_the_device_idle()
        self.marks.append(time.time())
        self.line.sendall(READY)
        if self.line.recv(len(GO)) != GO:
            raise SystemExit("the suite that this problem belongs to is gone")
        self.marks.append(time.time())

    def times(self) -> dict[str, list[float]]:
        marks = [*self.marks, time.time()]
        return {name: marks[at : at + 2] for name, at in (("preparing", 0), ("timing", 2)) if len(marks) > at + 1}


def main(asked: str, target: str, line: str) -> None:
    request = json.loads(asked)
    turn = Turn(socket.socket(fileno=int(line)), request["started"])
    try:
        found: dict[str, Any] = {"report": _report(request, turn)}
    except PostludeError as error:
        found = {"error": str(error)}
    except Exception as error:  # the file's own code runs here and may raise anything
        found = {"error": first_line(error)}
    write_whole(Path(target), json.dumps({**found, "times": turn.times()}))


def _report(request: dict[str, Any], turn: Turn) -> Any:
    asked = Request(request["device"], request["precision"])
    # The problem's prints go where errors go; the parent keeps the end of them.
    with quiet(debug=False), contextlib.redirect_stdout(sys.stderr), settled(asked) as settings:
        from postlude.cli.bench import run
        from postlude.cli.bench_state import Options
        from postlude.report.model import as_dict

        options = Options(
            Path(request["file"]),
            rounds=request["rounds"],
            seconds=request["seconds"],
            flushed=False,
            baselines=request["baselines"],
            train=request["train"],
            shapes=request["shapes"],
            beside_others=request["lock"] is not None,
        )
        with _choices(request, settings.device):
            return as_dict(run(settings, options, turn.wait)[0])


def _choices(request: dict[str, Any], device: str) -> contextlib.AbstractContextManager[None]:
    if request["lock"] is None or device != "cuda" or request["baselines"] == "few":
        return contextlib.nullcontext()
    from postlude.cli.suite_tuning import choices_in_turn

    return choices_in_turn(Path(request["lock"]))


def _leave_the_device_idle() -> None:
    """Nothing queued and no memory but what is used: another problem may be timed now, and N of them are there."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # a normal exit of torch takes a second, during which no other problem could be timed
