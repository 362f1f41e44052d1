"""Tables of tiles: uses and rows, files that are written whole, and everything that a folder may hold instead."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path

import pytest

from postlude import hardware, tile_table
from postlude.errors import PostludeError
from postlude.tile_table import SETTINGS, Key, Row, TileTable, TileUse, dumps, loads, read_tables, write_table

KEY = Key("a card", "2.11", "3.6", "abc")
ASKED = TileUse("product", "sm_90", "2 planes", (64, 128))
ROW = Row(ASKED, (("rows", 64), ("stages", 4), ("warps", 8)), tuned="2026-01-02T03:04:05+00:00")


def row(number: int, tuned: str = "2026-01-02T03:04:05+00:00") -> Row:
    use = TileUse("last pass", "sm_90", "float32", (0, number), "contiguous")
    return Row(use, (("elements", 1024),), tuned=tuned)


def test_a_row_answers_what_it_covers() -> None:
    assert TileTable((ROW,)).find(ASKED) == ROW
    anywhere = Row(TileUse("product", "", "2 planes"), ROW.settings)
    assert TileTable((anywhere,)).find(ASKED) == anywhere
    for other in (
        TileUse("product", "sm_80", "2 planes", (64, 128)),
        TileUse("product", "sm_90", "1 plane", (64, 128)),
        TileUse("product", "sm_90", "2 planes", (32, 128)),
        TileUse("last pass", "sm_90", "2 planes", (64, 128)),
    ):
        assert TileTable((ROW,)).find(other) is None
    assert str(ASKED) == "product (2 planes, 64→128 channels)"
    assert str(ROW) == "tuned on this card on 2026-01-02"


def test_of_two_rows_the_newer_one_stays() -> None:
    older, newer = row(8, "2026-01-01"), row(8, "2026-01-03")
    for first, second in ((older, newer), (newer, older)):
        assert TileTable((first,)).joined(TileTable((second,))).rows == (newer,)


def test_what_was_written_is_read() -> None:
    table = TileTable((ROW, row(32)))
    assert set(loads(dumps(table, KEY), KEY).rows) == set(table.rows)


def _with(**changes: object) -> str:
    data = json.loads(dumps(TileTable((ROW,)), KEY))
    data["rows"][0].update(changes)
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"format": 1',
        dumps(TileTable((ROW,)), KEY)[:-20],
        dumps(TileTable((ROW,)), Key("another card", "2.11", "3.6", "abc")),
        dumps(TileTable((ROW,)), KEY).replace('"format": 1', '"format": 2'),
        _with(kind="lunch"),
        _with(settings={"rows": 3, "stages": 4, "warps": 8}),
        _with(settings={"rows": "64", "stages": 4, "warps": 8}),
        _with(settings={"rows": 64, "stages": 4}),
        _with(settings={"rows": 64, "stages": 4, "warps": True}),
        _with(settings=None),
        _with(channels=[64]),
        _with(channels=["64", 128]),
        _with(tuned="yesterday"),
        _with(architecture=None),
    ],
    ids=lambda text: text[:20] + text[-50:],
)
def test_anything_else_is_no_table(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011, json's own among them
        loads(text, KEY)


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    numbers = [2**power for power in range(12)]
    gate = threading.Barrier(len(numbers))

    def write(number: int) -> None:
        gate.wait()
        write_table(tmp_path, KEY, TileTable((row(number),)))

    threads = [threading.Thread(target=write, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.use.channels[1] for one in read_tables(tmp_path, KEY).table.rows} == set(numbers)
    write_table(tmp_path, KEY, TileTable((ROW,)))
    assert len(list(tmp_path.iterdir())) == 1  # the last writer took over all the others' rows
    assert len(read_tables(tmp_path, KEY).table.rows) == len(numbers) + 1


def test_a_file_that_goes_away_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_table(tmp_path, KEY, TileTable((ROW,)))
    honest = Path.read_text

    def read_text(path: Path, *rest: str) -> str:
        if path == first and first.exists():
            write_table(tmp_path, KEY, TileTable((row(4),)))
            raise FileNotFoundError(path)
        return honest(path, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", read_text)
        patched.setattr(tile_table, "read_tables", lambda *_: tile_table.Found(TileTable((ROW,)), (first,), (), 0))
        found = read_tables(tmp_path, KEY)
    assert set(found.table.rows) == {ROW, row(4)}


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_table(tmp_path, KEY, TileTable((ROW,)))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(PostludeError, match="No space left"):
        write_table(tmp_path, KEY, TileTable((row(4),)))
    assert list(tmp_path.iterdir()) == [first]
    assert read_tables(tmp_path, KEY).table.rows == (ROW,)


def test_damaged_and_foreign_tables_are_passed_over(tmp_path: Path) -> None:
    other = Key("a card", "2.12", "3.6", "abc")
    write_table(tmp_path, other, TileTable((row(4),)))
    (tmp_path / "few_channels-0.cubin").write_bytes(b"")
    found = read_tables(tmp_path, KEY)
    assert (found.table.rows, found.foreign) == ((), 1)
    assert "another card" in str(found.problem)
    damaged = tmp_path / f"tiles-{KEY.digest}-01234567.json"
    damaged.write_bytes(b"\xff\xfe")
    assert "cannot be read" in str(read_tables(tmp_path, KEY).problem)
    write_table(tmp_path, KEY, TileTable((ROW,)))
    found = read_tables(tmp_path, KEY)
    assert (found.table.rows, found.problem, damaged.exists()) == ((ROW,), None, False)
    assert read_tables(tmp_path, other).table.rows == (row(4),)
    assert read_tables(tmp_path / "nowhere", KEY).problem is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hardware, "tile_key", lambda *_: KEY)
    hardware.tuned_tiles.cache_clear()
    yield tmp_path
    hardware.tuned_tiles.cache_clear()


@pytest.mark.parametrize("kind", ["damaged", "foreign"])
def test_one_warning_a_process(folder: Path, kind: str) -> None:
    key = KEY if kind == "damaged" else Key("another", "2.11", "3.6", "abc")
    for number in range(3):
        (folder / f"tiles-{key.digest}-0000000{number}.json").write_text("no table")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert hardware.tuned_tiles() == hardware.tuned_tiles() == TileTable()
    assert len(seen) == 1
    assert "postlude tune" in str(seen[0].message)


def test_no_warning_without_a_table_or_with_a_good_one(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hardware.tuned_tiles().rows == ()
        hardware.tuned_tiles.cache_clear()
        write_table(folder, KEY, TileTable((ROW,)))
        assert hardware.tuned_tiles().rows == (ROW,)


def test_the_kernels_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    here = hardware.tile_key()
    assert here == hardware.tile_key()
    monkeypatch.setattr(hardware, "kernel_hash", lambda _: "changed")
    assert hardware.tile_key().digest != here.digest


def test_every_setting_has_values() -> None:
    for settings in SETTINGS.values():
        assert all(list(values) == sorted(set(values)) for values in settings.values())
