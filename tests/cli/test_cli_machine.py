"""`postlude doctor` and `postlude demo`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.problem_texts import Run
from postlude import cards, hardware
from postlude.cli import demo, demo_case, demo_child, demo_table, doctor
from postlude.cli.frame import Settings

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
UNKNOWN = cards.estimated("NVIDIA L4", "sm_89", (58, 101_376, 48 << 20), 2.04e9, 300e9)


def test_doctor_looks_at_everything(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ran = run("doctor", "--device", "cpu", "--json", out)
    findings = {finding["what"]: finding for finding in json.loads(out.read_text(encoding="utf-8"))["findings"]}
    for what in ("torch", "threads", "malloc", "C++ compiler", "Triton", "self-test"):
        assert what in findings
    assert findings["self-test"]["state"] == "good"
    bad = [finding for finding in findings.values() if finding["state"] == "bad"]
    assert ran.code == bool(bad)
    assert all(finding["advice"] for finding in bad)


def test_doctor_says_what_to_change(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OLDEST_TORCH", (99, 0))
    ran = run("doctor", "--device", "cpu")
    assert ran.code == 1
    assert "install torch 99.0 or newer" in ran.out


def test_doctor_clears_its_cache_and_nothing_else(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path))
    ours = [tmp_path / f"few_channels-{'0' * 64}.cubin", tmp_path / f"few_channels-{'a' * 64}x1_y.tmp"]
    ours += [tmp_path / f"tiles-{'0' * 16}-{'a' * 8}.json", tmp_path / f".tiles-{'0' * 16}-{'a' * 8}.json.x1_y"]
    others = [tmp_path / "thesis.tex", tmp_path / "few_channels-short.cubin", tmp_path / "tiles-mine.json"]
    for path in (*ours, *others):
        path.write_bytes(b"1234")
    ran = run("doctor", "--clear-cache", "--device", "cpu")
    assert ran.code == 0
    assert "Deleted 4 compiled kernels and tables of tiles" in ran.out
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in others)
    assert "nothing to clear" in run("doctor", "--clear-cache", "--device", "cpu").out


@pytest.mark.parametrize(
    ("card", "state", "words"),
    [
        (cards.H200, "good", "H200: its rates and tiles were measured"),
        (cards.A100, "note", "A100: its rates come from published figures, not measured"),
        (UNKNOWN, "note", "NVIDIA L4: its rates are estimated"),
    ],
)
def test_doctor_names_the_card_and_where_its_figures_come_from(
    card: cards.Card, state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "machine_for", lambda _: hardware.machine_on(card))
    monkeypatch.setattr(hardware, "versions", lambda: {"gpu": f"NVIDIA {card.name}"})
    _, found = doctor._gpu()
    assert (found.what, found.state) == ("card", state)
    assert found.found.startswith(words)
    assert ("postlude tune" in found.advice) == (state == "note")


def test_doctor_finds_a_gpu_without_a_c_compiler_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles kernels itself, but needs one for what launches them."""
    monkeypatch.setattr(hardware, "can_compile", lambda: False)
    monkeypatch.setattr(hardware, "has_triton", lambda: True)
    found = doctor._triton(Settings("cuda", "auto"))
    assert (found.state, found.found.endswith("without a C compiler")) == ("bad", True)
    assert "install gcc or clang" in found.advice
    assert doctor._triton(Settings("cpu", "auto")).state == "good"
    monkeypatch.setattr(hardware, "has_triton", lambda: False)
    assert "pip install" in doctor._triton(Settings("cuda", "auto")).advice


def test_doctor_finds_an_old_card_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    old = replace(UNKNOWN, architecture="sm_75")
    monkeypatch.setattr(hardware, "machine_for", lambda _: hardware.machine_on(old))
    monkeypatch.setattr(hardware, "versions", lambda: {"gpu": "an old card"})
    (found,) = doctor._gpu()
    assert (found.state, "Ampere or newer" in found.advice) == ("bad", True)


def test_tiles_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path))
    assert (doctor._tiles().found, doctor._tiles().state) == ("as shipped", "good")
    (tmp_path / f"tiles-{hardware.tile_key().digest}-{'a' * 8}.json").write_text("no table")
    assert doctor._tiles().state == "note"
    assert "cannot be read" in doctor._tiles().found


def test_a_cache_that_cannot_be_cleared_is_one_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied() -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("postlude.run.cache.clear_cache", denied)
    ran = run("doctor", "--clear-cache", "--device", "cpu")
    assert ran.code == 2
    assert "could not be cleared: Permission denied." in ran.err


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"batch_size": 2, "depth": 4, "height": 6, "width": 6}
    cases = tuple(replace(case, cpu_sizes=sizes) for case in demo_case.CASES)
    monkeypatch.setattr(demo, "CASES", cases)
    monkeypatch.setattr(demo_child, "CASES", cases)
    monkeypatch.setattr(demo_case, "ROUNDS", 3)
    monkeypatch.setattr(demo_case, "SECONDS", 0.2)


@pytest.mark.usefixtures("tiny", "no_compiler")
def test_demo_ends_with_a_table_and_what_to_try_next(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def elsewhere(settings: object, _: object) -> demo_child.Timings:
        demo_child.main(settings.device, settings.precision)  # type: ignore[attr-defined]
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        events = [line for line in lines if "timings" in line]
        return {
            event["case"]: {name: demo_child.estimate_from(data) for name, data in event["timings"].items()}
            for event in events
        }

    monkeypatch.setattr(demo, "time_elsewhere", elsewhere)
    monkeypatch.setattr(hardware, "has_glibc", lambda: True)
    out = tmp_path / "out.json"
    page = tmp_path / "demo.html"
    ran = run("demo", "--device", "cpu", "--report", page, "--json", out)
    assert ran.code == 0
    for words in (
        "system malloc",
        "tuned malloc",
        "× eager",
        "torch.compile was not timed",
        "H200, recorded",
        "Recorded: not measured now",
        "nnU-Net stage",
        f"The report of all four: {page}",
        "postlude bench FILE.py",
    ):
        assert words in ran.out
    problems = json.loads(out.read_text(encoding="utf-8"))["problems"]
    assert [len(problem["seconds"]) for problem in problems] == [2, 2, 2, 1]
    table = ran.out[ran.out.index("milliseconds") : ran.out.index("× is how many")].splitlines()
    assert max(map(len, table)) <= 80
    assert "\x1b" not in ran.out
    assert "nnU-Net stage" in page.read_text(encoding="utf-8")
    assert all(problem["sites"] for problem in problems)


def test_figures_of_the_demos_table_stay_apart() -> None:
    cells = ("51.4", "33.8", "4.49", "11.19× (10.56–13.36)", "7.47×")
    line = demo_table._line("  CPU, system malloc", cells)
    assert line.split() == ["CPU,", "system", "malloc", *" ".join(cells).split()]
    assert len(line) == demo_table.WIDTH


@pytest.mark.parametrize("load", [0.1, 99.0])
def test_the_demo_says_when_others_use_the_machine(
    load: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "load_average", lambda: load)
    demo._introduce(Settings("cpu", "auto"))
    assert ("a load of 99.0" in capsys.readouterr().out) == (load > 1)


@pytest.mark.parametrize(("coverage", "words"), [(0.75, "interval with 75% confidence"), (0.0, "too few rounds")])
def test_an_interval_that_says_nothing_is_called_none(coverage: float, words: str) -> None:
    assert words in demo._interval(coverage)


def test_the_other_process_has_the_other_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in doctor.TUNED_MALLOC:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert not hardware.malloc_is_tuned()
    assert demo_child._other_malloc().items() >= doctor.TUNED_MALLOC.items()
    for name, value in doctor.TUNED_MALLOC.items():
        monkeypatch.setenv(name, value)
    assert doctor.TUNED_MALLOC.keys().isdisjoint(demo_child._other_malloc())


def test_a_process_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(demo_child.PostludeError, match="other malloc setting failed"):
        demo_child.time_elsewhere(demo_child.Settings("cpu", "auto"), lambda _: None)
