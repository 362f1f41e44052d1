"""Records survive the file, replace by key only, and name the kernels that they belong to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from postlude.check import records
from postlude.check.clock import Estimate
from postlude.check.records import COLUMNS, KEY, Record, environment, kernel_hash, merge, read, update, write

ROW = Record("conv3d(3→24, k3) → mean", "128×3×24", "float32", "contiguous", "fp32", "forward", "eager", threads=2)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [
        replace(ROW, ms_p50=0.1 + 0.2, error_rms=1.5e-300, device='a "quoted", name'),
        replace(ROW, variant="fused", speedup=float("inf"), threads=None),
    ]
    path = tmp_path / "deep" / "rows.csv"
    write(path, rows)
    assert read(path) == rows
    assert path.read_text(encoding="utf-8").splitlines()[0] == ",".join(COLUMNS)
    assert [file.name for file in path.parent.iterdir()] == ["rows.csv"]


def test_same_key_replaces_and_any_other_key_appends() -> None:
    newer = replace(ROW, ms_p50=2.0, torch="2.13", timestamp="later")
    assert merge([ROW], [newer]) == [newer]
    for name in KEY:
        other = replace(ROW, **{name: 7 if name == "threads" else "other"})  # type: ignore[arg-type]
        assert merge([ROW], [other]) == [ROW, other], name


def test_update_merges_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    other = replace(ROW, variant="fused")
    update(path, [ROW])
    update(path, [other])
    rows = update(path, [replace(ROW, ms_p50=3.0)])
    assert rows == read(path) == [replace(ROW, ms_p50=3.0), other]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write(path, [ROW])

    def broken() -> object:
        yield replace(ROW, variant="fused")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write(path, broken())  # type: ignore[arg-type]
    assert read(path) == [ROW]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        read(path)


SOURCE = '''"""Says what."""
import math

SIZE = 128  # a tile


def area(r):
    """Area."""
    return math.pi * r**2
'''


def hash_of(folder: Path, text: str, name: str = "a.py") -> str:
    (folder / "kernels").mkdir(exist_ok=True)
    for old in (folder / "kernels").iterdir():
        old.unlink()
    (folder / "kernels" / name).write_text(text)
    return kernel_hash(folder / "kernels")


def test_kernel_hash_ignores_what_does_nothing(tmp_path: Path) -> None:
    first = hash_of(tmp_path, SOURCE)
    reworded = SOURCE.replace("# a tile", "# another comment").replace("Area.", "The area.").replace("Says", "Tells")
    respaced = SOURCE.replace("\n\n\n", "\n\n\n\n\n").replace("math.pi * r**2", "(math.pi\n        * r ** 2)")
    undocumented = SOURCE.replace('    """Area."""\n', "")
    assert first == hash_of(tmp_path, reworded) == hash_of(tmp_path, respaced) == hash_of(tmp_path, undocumented)


@pytest.mark.parametrize(
    ("old", "new"),
    [("128", "64"), ("r**2", "r**3"), ("128", "128.0"), ("area", "disc"), ("math.pi", '"""Area."""')],
)
def test_kernel_hash_sees_a_change(tmp_path: Path, old: str, new: str) -> None:
    assert hash_of(tmp_path, SOURCE) != hash_of(tmp_path, SOURCE.replace(old, new))


def test_kernel_hash_covers_every_file_and_its_name(tmp_path: Path) -> None:
    first = hash_of(tmp_path, SOURCE)
    assert first != hash_of(tmp_path, SOURCE, "b.py")
    hash_of(tmp_path, SOURCE)
    (tmp_path / "kernels" / "more").mkdir()
    (tmp_path / "kernels" / "more" / "c.py").write_text("x = 1\n")
    assert kernel_hash(tmp_path / "kernels") != first
    with pytest.raises(ValueError, match="no Python or CUDA files"):
        kernel_hash(tmp_path / "nowhere")


def test_environment_fills_its_columns_and_git_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment("cpu")
    assert set(found) <= set(COLUMNS)
    assert all(found.values())
    records.commit.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert records.commit() == "unknown"
    records.commit.cache_clear()


def test_kernel_hash_reads_cuda_without_its_comments(tmp_path: Path) -> None:
    file = tmp_path / "kernel.cu"
    hashes = []
    for text in ("int a = 1; // one\n", "/* a\nnote */ int  a = 1;\n", "int a = 2;\n"):
        file.write_text(text)
        hashes.append(kernel_hash(tmp_path))
    assert hashes[0] == hashes[1] != hashes[2]


def test_times_stand_in_the_order_of_their_columns() -> None:
    eager, ours = Estimate.of([4.0, 4.0, 4.0, 4.0]), Estimate.of([1.0, 2.0, 2.0, 4.0])
    row = records.Record("c", "s", "d", "l", "p", "m", "v", *records.times_of(ours, eager))
    assert (row.ms_p50, row.ms_low, row.ms_high) == (2000.0, 1000.0, 4000.0)
    assert (row.speedup, row.speedup_low, row.speedup_high) == (2.0, 1.0, 4.0)
    assert row.error_rms is None
