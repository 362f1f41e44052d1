"""The entry point of the command line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from postlude.cli import frame, output
from postlude.cli.commands import app


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line. It always ends with an exit code; a mistake in the options is one sentence."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # its descriptor was closed before the start
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (it stays open)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # → and × under an ASCII locale
    if arguments is None:
        frame.end_like_an_interrupt()
    try:
        given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
        code = app(args=given, prog_name="postlude", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        output.complain("interrupted")
        code = frame.INTERRUPTED
    except BrokenPipeError:
        output.end_output()
        code = output.CLOSED
    except Exception as error:
        explain_it = getattr(error, "format_message", None)  # typer has its own copy of click, or imports click
        if isinstance(error, OSError):  # the help cannot be written
            output.complain(f"{error.strerror}.")
            raise SystemExit(frame.COULD_NOT_RUN) from None
        if explain_it is None:
            raise
        output.complain(f"{_as_a_sentence(explain_it())} See postlude --help.")
        code = frame.COULD_NOT_RUN
    raise SystemExit(code if isinstance(code, int) else frame.DONE)


def _as_a_sentence(text: str) -> str:
    """Click ends a message with a full stop, with a question mark and maybe a full stop after it, or with neither."""
    bare = text.rstrip(".")
    return bare if bare.endswith("?") else f"{bare}."
