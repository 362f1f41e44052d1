"""Every test belongs to one rung (see tests/rungs.py); what carries no other mark is `pure`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import interpreter

# A kernel in C++ takes seconds to compile: tests of them build theirs together (cpp_kernels.py), others do without.
os.environ.setdefault("POSTLUDE_CPP", "0")
RUNGS = {"interpret", "compile", "export", "networks", "record", "gpu"}
MARK = re.compile(r"\bmark\.(\w+)")
MARK_OF_A_FILE = re.compile(r"^pytestmark = (?:\[[^\]]*\]|.*)", re.MULTILINE)


@cache
def rungs_in(path: Path) -> frozenset[str]:
    """The rungs that a file of tests names, and `pure` unless one of them has all its tests."""
    text = path.read_text(encoding="utf-8")
    of_all = {name for marks in MARK_OF_A_FILE.findall(text) for name in MARK.findall(marks)}
    return frozenset(RUNGS.intersection(MARK.findall(text))) | (set() if of_all & RUNGS else {"pure"})


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test of the rung that is asked for: importing all of them takes ten seconds a process."""
    asked = config.option.markexpr
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if is_test and asked in {*RUNGS, "pure"} and asked not in rungs_in(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        rungs = RUNGS.intersection(mark.name for mark in item.iter_markers())
        if unnamed := rungs - rungs_in(item.path):
            raise pytest.UsageError(f"{item.nodeid}: its file does not name {unnamed}, and that rung would not see it")
        if not rungs:
            item.add_marker(pytest.mark.pure)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("interpret") and os.environ.get("TRITON_INTERPRET") != "1":
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))


NOTES: list[str] = []  # lines that tests want to be read at the end of a run


@pytest.fixture(scope="session")
def noted(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line to what is printed at the end, from whichever process the test runs in."""
    worker = getattr(request.config, "workeroutput", None)
    return NOTES.append if worker is None else worker.setdefault("notes", []).append


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_testnodedown(node: Any) -> None:
    NOTES.extend(getattr(node, "workeroutput", {}).get("notes", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in NOTES:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.make_fast()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Errors of ours raise, and what is kept from process to process is not the user's."""
    patch = pytest.MonkeyPatch()
    patch.setenv("POSTLUDE_STRICT", "1")
    if "POSTLUDE_CACHE_DIR" not in os.environ:
        patch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, so an element that nobody writes fails the comparison."""
    for name in ("empty", "empty_like", "empty_strided"):
        plain = getattr(torch, name)

        def poisoned(*args: object, _plain: object = plain, **kwargs: object) -> torch.Tensor:
            tensor: torch.Tensor = _plain(*args, **kwargs)  # type: ignore[operator]
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poisoned)


@pytest.fixture
def fresh_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is remembered of earlier checks: a test may have changed what was checked."""
    from postlude.site_check import check_site

    monkeypatch.setattr(check_site, "known", {})
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def refused_chains_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains that stay PyTorch's are put into the graph as well, so that a CPU tests what is rewired in training."""
    from postlude.run.ledger import Entry

    monkeypatch.setattr(Entry, "is_left_to_pytorch", False)


@pytest.fixture
def small_values_fuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU's plans gain from 40 KiB on, so that a test need not wait for a megabyte's float64."""
    from postlude.run.execute import prepared

    for name in ("SMALLEST_STORED", "SMALLEST_REDUCED"):
        monkeypatch.setattr(f"postlude.plan.cpu.{name}", 40 << 10)
    prepared.cache_clear()
    yield
    prepared.cache_clear()


@pytest.fixture
def packed_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few the channels, every tap is a shifted read of the packed input, as in exported files."""
    monkeypatch.setattr("postlude.plan.convolve.unfolded_product_for", lambda *_: None)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
