"""Writing: whole files or none, and tables that survive a pipe."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from postlude.cli import output
from postlude.errors import PostludeError


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    output.write_json(path, {"a": "→"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "→"}
    assert oct(path.stat().st_mode & 0o400) == "0o400"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(PostludeError, match=r"it cannot be written \(No space left on device\)"):
        output.write_json(path, {"a": "new"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "→"}
    assert os.listdir(tmp_path) == ["out.json"]  # noqa: PTH208 (a list is compared)


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target.json", tmp_path / "link.json", tmp_path / "pipe"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    output.write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": 1}
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        output.check_writable(pipe)
        output.write_json(pipe, {"a": 1})
        assert json.loads(os.read(reader, 100)) == {"a": 1}
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_file_name_that_is_no_text_can_be_written_about(tmp_path: Path) -> None:
    name = os.fsdecode(b"na\xffme.py")
    output.write_json(tmp_path / "out.json", {"file": name})
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == {"file": name}


def test_unserialisable_data_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        output.write_json(tmp_path / "out.json", {"a": object()})
    assert not any(tmp_path.iterdir())


def test_tables_are_not_cut_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 120
    output.show_table(["name", "number"], [[long, "1"], ["[bold]", "22"]], numbers=["number"])
    lines = capsys.readouterr().out.splitlines()
    assert any(long in line for line in lines)
    assert any("[bold]" in line for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_sentences_are_wrapped_between_words_on_a_terminal_only() -> None:
    line = "  why: " + "several words " * 10 + "and /a/path/that/is/longer/than/a/line/has/room/for"
    wrapped = output._wrapped(line, 40).splitlines()
    assert [part for part in wrapped if len(part) > 40] == [wrapped[-1]]
    assert all(part.startswith("    ") for part in wrapped[1:])
    assert " ".join(part.strip() for part in wrapped) == line.strip()
    assert output._wrapped("short", 40) == "short"


def test_progress_is_one_plain_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with output.working("Counting") as update:
        update("one")
    assert capsys.readouterr() == ("", "postlude: Counting …\n")


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_number_is_broken_on_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, no_color=True, highlight=False)
    monkeypatch.setattr(output, "_console", lambda _: console)
    columns = ["quantity", "points", "RMS error", "PyTorch's own", "allowed", "worst error", "allowed worst", ""]
    numbers = ["22", "1.5e-07", "1.6e-07", "1.1e-06", "3.7e-06", "3.9e-05"]
    output.show_table(columns, [["output (large offset)", *numbers, "right"]], numbers=columns[1:-1])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    assert all(any(re.search(rf"(^|\s){re.escape(one)}\b", line) for line in lines) for one in [*numbers, "right"])
