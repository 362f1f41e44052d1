"""Output: results on stdout, progress on stderr, files written completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from postlude.errors import PostludeError
from postlude.files import is_special, write_whole

CLOSED = 141  # the exit code of a program whose reader has left, as shells give it
_LEAST_TEXT = 13  # characters that a column of text needs, or its longest word
_GAP = 3  # between two columns
_PIPE_WIDTH = 240  # for a pipe or file, where cutting or folding a table would only do harm


def say(text: str = "", style: str = "") -> None:
    console = _console(sys.stdout)
    shown = "\n".join(_wrapped(line, console.width) for line in text.split("\n")) if console.is_terminal else text
    console.print(Text(shown, style=style), soft_wrap=True)


def _wrapped(line: str, width: int) -> str:
    """The line wrapped between words, with its indentation; a word that does not fit, such as a path, stays whole."""
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    wrapper = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    wrapper.replace_whitespace = False
    return wrapper.fill(line)


def complain(text: str) -> None:
    _console(sys.stderr).print(Text(f"postlude: {text}"), soft_wrap=True)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> None:
    """Shows a table; columns named in `numbers` are right-aligned.

    On a terminal that is too narrow for it, text is wrapped, but no number; if that is not enough, every row becomes a
    sentence.
    """
    console = _console(sys.stdout)
    texts = [[column, *(row[place] for row in rows)] for place, column in enumerate(columns)]
    least = [_least_width(parts, columns[place] in numbers) for place, parts in enumerate(texts)]
    if console.is_terminal and sum(least) + _GAP * (len(columns) - 1) > console.width:
        for row in rows:
            say(_sentence(columns, row))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for parts, width in zip(texts, _shared(texts, least, console.width - _GAP * (len(columns) - 1))):
        justify: Literal["left", "right"] = "right" if parts[0] in numbers else "left"
        table.add_column(Text(parts[0]), justify=justify, overflow="fold", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:  # rich pads lines to the table's width; the padding is removed
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _least_width(texts: Sequence[str], is_number: bool) -> int:
    """The width at which a column of numbers breaks none, and a column of text no short word."""
    widest = max((cell_len(word) for text in texts for word in text.split()), default=1)
    return widest if is_number else min(widest, _LEAST_TEXT)


def _shared(texts: Sequence[Sequence[str]], least: Sequence[int], room: int) -> list[int]:
    """The width of each column: what it wants where there is room, else the widest columns give way."""
    wanted, widths = [max(1, *(cell_len(text) for text in parts)) for parts in texts], list(least)
    for _ in range(max(0, min(room, sum(wanted)) - sum(widths))):
        place = min((one for one in range(len(widths)) if widths[one] < wanted[one]), key=widths.__getitem__)
        widths[place] += 1
    return widths


def _sentence(columns: Sequence[str], row: Sequence[str]) -> str:
    """A row of a table in words: what it is about, then what is known, each number behind its column's name."""
    known = [f"{column} {cell}".strip() for column, cell in zip(columns[1:], row[1:]) if cell not in ("", "–")]
    return f"{row[0]}: {', '.join(known)}"


@contextlib.contextmanager
def working(text: str, *, timed: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows on stderr what is being done; the returned function updates the text.

    While something is timed nothing else may run, so the line then changes only when it is updated.
    """
    console = _console(sys.stderr)
    if not console.is_terminal:
        complain(f"{text} …")
        yield lambda _: None
        return
    started = time.monotonic()

    def line(more: str = "") -> Text:
        passed = time.monotonic() - started
        return Text(f"{text} … {passed:3.0f} s  {more}", style="dim", overflow="ellipsis", no_wrap=True)

    from rich.live import Live

    latest = [""]
    with Live(
        console=console,
        transient=True,
        auto_refresh=not timed,
        refresh_per_second=2,
        get_renderable=lambda: line(latest[0]),
    ) as live:

        def update(more: str) -> None:
            latest[0] = more
            live.refresh()

        yield update


def check_writable(path: Path | None) -> None:
    """Raises, with one sentence, if a result could not be written: before the work, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise PostludeError(f"{path}: this is a directory; name a file to write to.")
    if is_special(path):
        return
    if not path.parent.is_dir():
        raise PostludeError(f"{path}: the folder {path.parent} does not exist.")
    if not os.access(path.parent, os.W_OK):
        raise PostludeError(f"{path}: the folder {path.parent} cannot be written to.")


def write_json(path: Path, data: dict[str, Any]) -> None:
    write_whole(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        end_output()
        raise SystemExit(CLOSED)


def end_output() -> None:
    """Sends the rest to nobody, after the reader of a pipe has left; what Python writes at its end as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _console(stream: TextIO) -> Console:
    width = None if stream.isatty() else _PIPE_WIDTH
    # The stream says whether it is a terminal; rich handles NO_COLOR and TERM=dumb.
    return _Console(
        file=stream, width=width, highlight=False, markup=False, emoji=False, force_terminal=stream.isatty()
    )
