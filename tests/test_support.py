"""docs/support.md is what `lower` says today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from postlude.plan import Refusal

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("support_table", ROOT / "tools" / "support_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(tool: ModuleType) -> str:
    made: str = tool.page()
    return made


def test_the_page_is_up_to_date(page: str) -> None:
    written = (ROOT / "docs" / "support.md").read_text()
    assert written == page, "docs/support.md is out of date: run python tools/support_table.py --write"


def test_a_changed_answer_changes_the_page(tool: ModuleType, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: `lower` refuses everything."""
    monkeypatch.setattr(tool, "lower", lambda *_, **__: Refusal(("not today",)))
    changed = tool.page()
    assert changed != page
    assert "1. not today" in changed


def test_pytorch_convolves_and_multiplies_in_fp64(page: str) -> None:
    """As `lower` decides where it is not told to plan what is slower."""
    ours = [line for line in page.splitlines() if "ours in" in line and line.startswith("|")]
    assert any(line.startswith("| linear |") for line in ours)
    assert not any("fp64" in line for line in ours)


def test_every_word_has_a_row(tool: ModuleType) -> None:
    from postlude.words import NORMS, POINTWISE

    assert {*POINTWISE, *map(tool.norm_name, NORMS)} <= set(dict(tool.rows()))
