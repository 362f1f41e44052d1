"""Recorded results: the README shows what was measured, and says so when the code has changed since."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from postlude.check import records

pytestmark = pytest.mark.record
ROOT = Path(__file__).parents[1]


@pytest.fixture
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_and_docs_show_the_recorded_results(table: ModuleType) -> None:
    for path, tables in table.TABLES.items():
        text = path.read_text(encoding="utf-8")
        assert table.rewritten(text, tables) == text, "run python benchmarks/table.py"


def test_every_row_says_what_it_was_measured_on(table: ModuleType) -> None:
    for row in [
        row for path in (table.RESULTS, table.GPU_RESULTS, table.KERNELBENCH_RESULTS) for row in records.read(path)
    ]:
        assert row.torch
        assert row.commit
        assert row.kernel_hash
        assert row.device
        assert row.malloc in ("default", "tuned")
        assert row.ms_low is not None
        assert row.ms_p50 is not None
        assert row.ms_low <= row.ms_p50


def test_old_results_are_named(table: ModuleType) -> None:
    rows = records.read(table.RESULTS)
    aged = [dataclasses.replace(row, kernel_hash="0", commit="abc") for row in rows]
    assert table.stale(aged, table.CPU_SOURCES) == ["abc"]
    assert "abc" in table._where(aged, table.CPU_SOURCES)
