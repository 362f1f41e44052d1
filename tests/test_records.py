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
    for name in ("rows", "kernelbench_table"):
        loaded(name)
    return loaded("table")


@pytest.fixture(scope="module")
def level2(table: ModuleType) -> ModuleType:
    return loaded("kernelbench_table")


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


def test_the_picture_of_level_2_shows_the_recorded_results(table: ModuleType) -> None:
    level2 = loaded("kernelbench_picture")
    drawn = level2.PICTURE.read_text(encoding="utf-8")
    assert drawn == level2.draw(), "run python benchmarks/kernelbench_picture.py"
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


def test_lean_steps_have_a_table_of_their_own(
    table: ModuleType, picture: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other figures are what they are without them, and so are they beside first steps."""
    known = records.read(table.NETWORK_RESULTS)
    before = table.render_networks(), table._networks_sentence(), picture.groups()
    lean, first = [
        [dataclasses.replace(row, **changed) for row in known if (row.variant, row.mode) == ("postlude", mode)]
        for mode, changed in (
            ("training step", {"variant": table.LEAN, "ms_p50": 1e-3, "peak_mib": 17.0, "kernel_hash": "older"}),
            ("inference", {"mode": "first step"}),
        )
    ]
    records.write(tmp_path / "networks.csv", [*lean, *known, *first])
    for module in (table, picture):
        monkeypatch.setattr(module, "NETWORK_RESULTS", tmp_path / "networks.csv")
    assert (table._networks_sentence(), picture.groups()) == before[1:]
    text = table.render_networks()
    start = text.index(table.LEAN_HEAD)
    assert text[:start] + text[start:].split("\n\n", 1)[1] == before[0]
    assert "| nnU-Net | 0.001 | 0.00 | 4534 | 4333 | 17 | 5.4e-03 | changed |" in text[start:]
    assert text[start:].count("\n| ") == len(lean)


def test_every_row_says_what_it_was_measured_on(table: ModuleType, level2: ModuleType) -> None:
    for row in [
        row for path in (table.RESULTS, table.GPU_RESULTS, level2.KERNELBENCH_RESULTS) for row in records.read(path)
    ]:
        assert row.torch
        assert row.commit
        assert row.kernel_hash
        assert row.device
        assert row.malloc in ("default", "tuned")
        if row.ms_p50 is None:
            assert row.reason
            continue
        assert row.ms_low is not None
        assert row.ms_p50 is not None
        assert row.ms_low <= row.ms_p50


def test_old_results_are_named(table: ModuleType) -> None:
    (row, *_) = records.read(table.RESULTS)
    now = records.kernel_hash(table.CPU_SOURCES)
    assert table.since(dataclasses.replace(row, kernel_hash=now), table.CPU_SOURCES) == "same"
    assert table.since(dataclasses.replace(row, kernel_hash="0"), table.CPU_SOURCES) == "changed"


def test_level_2_is_told_by_class_precision_and_shapes(
    table: ModuleType, level2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two precisions, other shapes, a linear layer that is slower, and a problem that failed."""
    known = records.read(level2.KERNELBENCH_RESULTS)
    rows = [row for row in known if row.mode == "forward" and row.precision == "tf32"]
    fp32 = [dataclasses.replace(row, precision="fp32", floor_ms=0.1, verdict="right") for row in rows[:3]]
    other = [dataclasses.replace(row, mode="forward at other shapes", shape="1×2") for row in rows[:3]]
    slower = [
        dataclasses.replace(row, chain="9_Matmul_ReLU", ms_p50=time, speedup=1 / time, precision="fp32")
        for row, time in zip(rows[:3], (1.0, 1.0, 4.0), strict=True)
    ]
    failed = dataclasses.replace(
        rows[2], chain="13_ConvTranspose3d_Mean", ms_p50=None, reason="no memory", verdict="failed"
    )
    path = tmp_path / "rows.csv"
    records.write(path, [*rows, *fp32, *other, *slower, failed])
    monkeypatch.setattr(level2, "KERNELBENCH_RESULTS", path)
    text = level2.render("forward")
    assert "| linear, in strict fp32 | 1 | 0.25 | 0.25 | 0 of 1 | 0 of 1 |" in text
    assert "| all, with TF32 allowed at other shapes | 1 |" in text
    assert f"All {len(rows) // 3} rows with TF32 allowed</summary>" in text  # the one that failed is none of them
    assert "Not timed: 13 (failed: no memory)." in text
    worst = text.split("gain least")[1].split("<details")[0]
    assert "| 9 | Matmul ReLU | the file's | fp32 | 0.25 | 0.25 |" in worst
    assert worst.count("\n| ") == 1 + level2.WORST
    assert "Slower than torch.compile: 9 (in strict fp32)." in text
    (first, *_) = level2.known("forward")
    assert first == "tf32"  # of which most were measured: the headline is about it


def test_rows_that_were_not_checked_are_named(
    level2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = records.read(level2.KERNELBENCH_RESULTS)
    rows = [row for row in known if row.mode == "forward" and row.chain.startswith(("61_", "72_"))]
    skipped = [
        dataclasses.replace(row, verdict="not checked" if row.chain.startswith("72_") else "right") for row in rows
    ]
    records.write(tmp_path / "rows.csv", skipped)
    monkeypatch.setattr(level2, "KERNELBENCH_RESULTS", tmp_path / "rows.csv")
    assert "No row is slower than torch.compile. Not checked against float64: 72 (" in level2.render("forward")


def test_the_headline_names_the_networks_that_are_slower(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for row in records.read(table.NETWORK_RESULTS) if row.chain == "nnU-Net"]
    slow = [dataclasses.replace(row, ms_p50=1e3) if row.variant == "postlude" else row for row in rows]
    ahead = [dataclasses.replace(row, chain="UNet") for row in rows]
    records.write(tmp_path / "networks.csv", [*slow, *ahead])
    monkeypatch.setattr(table, "NETWORK_RESULTS", tmp_path / "networks.csv")
    sentence = table._networks_sentence()
    assert "layouts: UNet 1." in sentence
    assert " Slower than torch.compile: nnU-Net in training (0.0" in sentence
    assert "×), nnU-Net in inference (0.0" in sentence


@pytest.fixture
def networks(table: ModuleType) -> ModuleType:
    loaded("gpu")
    loaded("network_models")
    return loaded("networks")


NETWORK = """
import sys, time
name = sys.argv[sys.argv.index("--only") + 1]
print("compiling", name, flush=True)
if name == "SegResNet":
    time.sleep(300)
if name == "resnet50_gn":
    sys.exit(3)
print("waiting to be timed", flush=True)
if sys.stdin.readline():
    print(name, "is timed with", *sys.argv[sys.argv.index("--variants") + 1 :], flush=True)
    time.sleep(300 if name == "MONAI UNet AN" else 0)
"""


def test_what_becomes_of_one_network_leaves_the_others(
    networks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One hangs before it is ready, one while it is timed, and the process of one ends."""
    (tmp_path / "child.py").write_text(NETWORK)
    monkeypatch.setattr(networks, "__file__", str(tmp_path / "child.py"))
    monkeypatch.setattr(networks, "_TIMED_WITHIN_S", 2.0)
    names = ["SegResNet", "resnet50_gn", "MONAI UNet AN", "nnU-Net"]
    asked = ["--only", *names, "--modes", "train", "--jobs", "4", "--ready-within", "3", "--graphs", "nnU-Net"]
    monkeypatch.setattr(sys, "argv", ["", *asked, "--variants", "eager", "postlude memory=lean"])
    assert networks.main() == 1
    said = capfd.readouterr().out
    assert "SegResNet, train: not ready after 3 s, not timed" in said
    assert "resnet50_gn, train: its process ended with 3" in said
    assert "MONAI UNet AN, train: its process ended with -9" in said
    assert "nnU-Net is timed with eager postlude memory=lean compile reduce-overhead postlude reduce-overhead" in said


def test_memory_is_lean_in_training_only(networks: ModuleType) -> None:
    asked = ["eager", "postlude", "postlude memory=lean"]
    assert networks.variants_of("train", asked) == asked
    assert networks.variants_of("inference", asked) == asked[:2]


def test_networks_are_measured_again_only_where_the_code_has_changed(table: ModuleType, networks: ModuleType) -> None:
    known = records.read(ROOT / "benchmarks" / "results" / "h200-networks.csv")
    asked = ("nnU-Net", networks.mode_of(True), ["eager", "compile", "postlude"])
    code = records.kernel_hash(networks.NETWORK_SOURCES)
    today = [dataclasses.replace(row, kernel_hash=code) for row in known]
    assert networks.is_recorded(*asked, today)
    assert not networks.is_recorded(*asked, [row for row in today if row.variant != "compile"])
    older = [dataclasses.replace(row, kernel_hash="older" if row.variant == "postlude" else code) for row in today]
    assert not networks.is_recorded(*asked, older)
    assert not networks.is_recorded("nnU-Net", networks.FIRST_STEP, ["eager"], today)


def test_files_that_were_not_timed_are_in_the_harness_table(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = loaded("kernelbench_harness")
    (one, *_) = [row for row in harness.read(table.HARNESS_RESULTS) if row.setting == "default"]
    wrong = dataclasses.replace(one, problem="3_Wrong", right=4, file_ms=0.0, reference_ms=0.0)
    harness.write(tmp_path / "rows.csv", [one, wrong])
    monkeypatch.setattr(table, "HARNESS_RESULTS", tmp_path / "rows.csv")
    text = table.render_harness()
    assert "| 3 | Wrong |  | no file |  |  | 4 of 5 right |  |" in text
    assert "1 of 2 files are right" in text
