"""The documents: links and anchors lead somewhere, Python parses, commands and options exist, README's code runs."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torch import nn

import postlude
from postlude.cli.commands import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
BUILT = re.compile(r"gallery/\w+\.html")  # made by `make docs`
LINES = 120


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def blocks(text: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [code for language, code in found if language in languages]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site make from headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE), re.M)
    made = set()
    for heading in headings:
        plain = unicodedata.normalize("NFKD", re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading))
        words = re.sub(r"[^\w\s-]", "", plain.encode("ascii", "ignore").decode()).strip().lower()
        made.add(re.sub(r"[-\s]+", "-", words))
    return made


def broken_links(page: Path, text: str) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if link.startswith(("http://", "https://", "mailto:")) or BUILT.fullmatch(link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and anchor not in anchors(target):
            yield f"{link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page, text_of(page))) == []


def test_a_broken_link_is_seen() -> None:
    text = "[a](docs/nothing.md) [b](docs/results.md#nowhere) [c](docs/results.md#networks) `[d](no)`"
    found = [line.split(":")[0] for line in broken_links(ROOT / "README.md", text)]
    assert found == ["docs/nothing.md", "docs/results.md#nowhere"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_parses_and_commands_exist(page: Path) -> None:
    if page.name != "CONTRIBUTING.md":  # its Python block is lines of several files
        for code in blocks(text_of(page), "python"):
            ast.parse(code)
    wrong = [
        problem for code in blocks(text_of(page), "", "sh") for line in code.splitlines() for problem in faults(line)
    ]
    assert wrong == []


def faults(line: str) -> Iterator[str]:
    """What a shell line names that does not exist."""
    command = re.split(r"\s#|\s{3,}", line.strip())[0]
    if match := re.match(r"postlude (\w+)", command):
        known = typer.main.get_command(app)
        if match[1] not in known.commands:  # type: ignore[attr-defined]
            yield f"postlude has no command {match[1]}"
            return
        options = {name for option in known.commands[match[1]].params for name in option.opts}  # type: ignore[attr-defined]
        unknown = set(re.findall(r"(?<!\S)-{1,2}[a-z][\w-]*", command)) - options
        if unknown:
            yield f"postlude {match[1]} has no {', '.join(sorted(unknown))}"
    if (match := re.match(r"make (\w+)", command)) and f"\n{match[1]}:" not in text_of(ROOT / "Makefile"):
        yield f"the Makefile has no {match[1]}"
    for script in re.findall(r"python ((?:benchmarks|tools|tests|examples)/\S+\.py)", command):
        if not (ROOT / script).exists():
            yield f"there is no {script}"


def test_a_wrong_command_is_seen() -> None:
    lines = [
        "postlude fly FILE.py",
        "postlude bench FILE.py --fast",
        "make cake",
        "python tools/none.py",
        "make demo   # x",
    ]
    assert [len(list(faults(line))) for line in lines] == [1, 1, 1, 1, 0]


def test_the_readme_is_short() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= LINES


@pytest.mark.parametrize("page", ["README.md", "docs/recipes.md"])
def test_the_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_values_fuse: None) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks(text_of(ROOT / page), "python"):
        if not imports_a_framework(code):
            torch._dynamo.reset()
            exec(code, names())
    assert (tmp_path / "out.html").exists()


def imports_a_framework(code: str) -> bool:
    """Those are run by tests/networks/test_recipes.py."""
    frameworks = r"^(?:from|import) (?:monai|lightning|diffusers|nnunetv2|torch\.nn\.parallel)\b"
    return re.search(frameworks, code, re.MULTILINE) is not None


def names() -> dict[str, Any]:
    """What the blocks take as given."""
    conv, relu, norm = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.GroupNorm(2, 8)
    model, x = nn.Sequential(conv, relu, norm, nn.MaxPool2d(2)), torch.randn(4, 3, 12, 12)
    sites = postlude.optimize(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm), x, verify=False).sites
    given = {"weight": torch.randn(8, 3, 3, 3), "gamma": torch.ones(8), "beta": torch.zeros(8)}
    return {
        "model": model,
        "inputs": x,
        "x": x,
        "conv": conv,
        "relu": relu,
        "norm": norm,
        "chain": sites[0].chain,
        **given,
    }
