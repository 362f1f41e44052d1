"""What every command shares: its options, quiet libraries, one sentence for an error, exit codes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer

from postlude.cli.output import CLOSED, check_writable, complain, end_output, write_json
from postlude.errors import PostludeError, first_line

DONE, NO, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Request:
    """The options that every command has."""

    device: str | None = None
    precision: str = "auto"
    json: Path | None = None
    debug: bool = False
    convolution: str = "auto"


@dataclass(frozen=True)
class Settings:
    """A request with its defaults filled in, which this machine can run."""

    device: str
    precision: str
    convolution: str = "auto"  # or "pytorch": PyTorch's own call, bit for bit


@dataclass(frozen=True)
class Answer:
    code: int
    data: dict[str, Any]  # what --json writes


def run(name: str, request: Request, command: Callable[[Settings], Answer]) -> None:
    """Runs a command and ends with its exit code."""
    raise typer.Exit(_run(name, request, command))


def _run(name: str, request: Request, command: Callable[[Settings], Answer]) -> int:
    try:
        with quiet(request.debug):
            check_writable(request.json)
            if request.json is not None and request.json.suffix == ".py":  # a problem file, by mistake
                raise PostludeError(
                    f"{request.json}: --json would overwrite a Python file with results; name another file."
                )
            with settled(request) as settings:
                answer = command(settings)
            if request.json is not None:
                write_json(request.json, {"command": name, "exit_code": answer.code, **answer.data})
            return answer.code
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        end_output()
        return CLOSED
    except Exception as error:
        if request.debug:
            traceback.print_exc()
        complain(_sentence(error))
        return COULD_NOT_RUN


def end_like_an_interrupt() -> None:
    """Makes `kill` and a closed terminal act like Ctrl-C, so that no process and no folder of ours is left."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # under nohup it is ignored already
            signal.signal(number, interrupt)


def check_word(option: str, word: str | None, choices: Sequence[str]) -> None:
    """Raises, with one sentence, if an option's value is not one of its choices."""
    if word is not None and word not in choices:
        raise PostludeError(f"{option} {word} is unknown; use {', '.join(choices[:-1])} or {choices[-1]}.")


def _sentence(error: Exception) -> str:
    if isinstance(error, PostludeError):
        return str(error)
    return f"unexpected {first_line(error)} (--debug shows where)."


@contextlib.contextmanager
def settled(request: Request) -> Iterator[Settings]:
    """The request with its defaults filled in, and PyTorch's precision switches set to it while it runs."""
    if request.device is not None and request.device not in DEVICES:
        raise PostludeError(f"--device {request.device} is unknown; use {' or '.join(DEVICES)}.")
    from postlude import hardware
    from postlude.check.modes import pytorch_switches
    from postlude.plan import CONVOLUTIONS
    from postlude.run.execute import check_precision

    device = request.device or hardware.default_device()
    if device == "cuda" and hardware.default_device() != "cuda":
        raise PostludeError("--device cuda needs an NVIDIA GPU that this PyTorch can use; there is none here.")
    import torch

    with pytorch_switches(request.precision, torch.device(device)):
        check_precision(request.precision, device)
        check_word("--convolution", request.convolution, CONVOLUTIONS)
        yield Settings(device, request.precision, request.convolution)


@contextlib.contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """Keeps warnings and logs of libraries out of the output."""
    # Child processes (Inductor's workers) and torch's C++ code read these once, when they start.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if debug or "TORCH_LOGS" in os.environ:
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
