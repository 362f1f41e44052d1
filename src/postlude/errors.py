"""Errors that a user can cause: one sentence that says what is wrong and what to do."""

import os


class PostludeError(Exception):
    """Base class of all errors that Postlude raises on purpose. The message is one sentence for the user."""


class ProblemFileError(PostludeError):
    """A problem file (`Model`, `get_inputs`, `get_init_inputs`) cannot be used as it is."""


class PrecisionError(PostludeError):
    """The precision that was asked for does not exist on this device."""


def raises_errors() -> bool:
    """Whether errors of ours raise instead of leaving a chain to PyTorch (`POSTLUDE_STRICT=1`)."""
    return os.environ.get("POSTLUDE_STRICT", "") not in ("", "0")


def first_line(error: BaseException) -> str:
    """An error of somebody else's code in one line, to be quoted in a sentence: its kind, and what it says first."""
    text = what_it_says(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def what_it_says(error: BaseException) -> str:
    """The first line of an error's message, without the full stop."""
    return (str(error).strip().splitlines() or [""])[0].rstrip(" .")
