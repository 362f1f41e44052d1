"""Recorded results: README, picture and docs/results.md show what was measured, and say when the code changed since."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from postlude.check import records

pytestmark = pytest.mark.record
ROOT = Path(__file__).parents[1]


def loaded(name: str) -> ModuleType:
    """A script of benchmarks, which find each other by name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return loaded("table")


@pytest.fixture(scope="module")
def picture(table: ModuleType) -> ModuleType:
    return loaded("picture")


def test_readme_and_docs_show_the_recorded_results(table: ModuleType) -> None:
    for path, tables in table.TABLES.items():
        text = path.read_text(encoding="utf-8")
        assert table.rewritten(text, tables) == text, "run python benchmarks/table.py"


def test_the_picture_shows_the_recorded_results(picture: ModuleType) -> None:
    drawn = picture.PICTURE.read_text(encoding="utf-8")
    assert drawn == picture.draw(picture.groups()), "run python benchmarks/picture.py"
    ET.fromstring(drawn)


def test_the_picture_has_the_losses_and_every_group(picture: ModuleType) -> None:
    rows = [row for group in picture.groups() for row in group.rows]
    worst = min(min(row.eager, row.compiled or math.inf) for row in rows)
    shown = [case for mode in ("forward", "training step") for case in picture.cases(picture.GPU_RESULTS, mode)]
    assert worst <= min(case.times_eager for case in shown)
    assert "loss" in picture.draw(picture.groups())
    assert {row.label.split(":")[0] for row in rows} >= {"61", "23"}


def test_networks_are_drawn_and_listed_once_they_are_recorded(
    table: ModuleType, picture: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [row for row in records.read(table.GPU_RESULTS) if row.mode == "training step"]
    named = [dataclasses.replace(row, chain="nnU-Net", dtype="float16 autocast", precision="auto") for row in steps[:3]]
    records.write(tmp_path / "networks.csv", named)
    for module in (table, picture):
        monkeypatch.setattr(module, "NETWORK_RESULTS", tmp_path / "networks.csv")
    assert "| nnU-Net |" in table.render_networks()
    (group,) = [group for group in picture.groups() if group.title.startswith("Networks")]
    assert group.rows[0].label == "nnU-Net, float16 autocast"


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
    (row, *_) = records.read(table.RESULTS)
    now = records.kernel_hash(table.CPU_SOURCES)
    assert table.since(dataclasses.replace(row, kernel_hash=now), table.CPU_SOURCES) == "same"
    assert table.since(dataclasses.replace(row, kernel_hash="0"), table.CPU_SOURCES) == "changed"
