"""The wheel: it has everything that runs, and works outside the checkout."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import postlude

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling is missing: make install brings it"
)
USE = """
import pathlib, sys
import torch
from torch import nn
import postlude
assert str(pathlib.Path(postlude.__file__)).startswith(sys.argv[1]), postlude.__file__
model = nn.Sequential(nn.Conv3d(4, 16, 3), nn.GroupNorm(4, 16), nn.ReLU()).eval()
with torch.no_grad():
    result = postlude.optimize(model, torch.randn(2, 4, 10, 34, 34))
assert result.verdict is not None and result.verdict.right, result
result.report("out.html")
from postlude.cli.recorded import H200
from postlude.run.launch import cuda_source
assert H200.exists() and str(H200).startswith(sys.argv[1]), H200
assert cuda_source("few_channels.cu").headers
print("fused", sum(site.is_fused for site in result.sites))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], ROOT)
    (built,) = folder.glob("*.whl")
    return built


def run(command: list[str], folder: Path, **variables: str) -> str:
    env = {**os.environ, **variables}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_holds_every_file_of_the_package_and_what_the_demo_shows(wheel: Path) -> None:
    package = Path(postlude.__file__).parent
    there = {f"postlude/{path.relative_to(package).as_posix()}" for path in package.rglob("*") if path.is_file()}
    expected = {name for name in there if "__pycache__" not in name} | {"postlude/recorded/h200.csv"}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= names
    assert not {name for name in names - expected if ".dist-info/" not in name}
    for name in ("py.typed", "kernels/cuda/few_channels.cu", "report/templates/page.html"):
        assert f"postlude/{name}" in names


def test_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith("/METADATA")]
        (entries,) = [files.read(n).decode() for n in files.namelist() if n.endswith("/entry_points.txt")]
        about = Parser().parsestr(files.read(name).decode())
    assert about["Version"] == postlude.__version__
    assert set(about.get_all("Provides-Extra", [])) >= {"gpu", "networks", "docs", "dev"}
    assert "postlude = postlude.cli:main" in entries
    assert "[torch_dynamo_backends]" in entries


def test_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--no-compile"]
    run([*pip, "--target", str(target), str(wheel)], tmp_path)
    cache = {"PYTHONPATH": str(target), "POSTLUDE_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    assert "optimize" in run([sys.executable, str(target / "bin" / "postlude"), "--help"], tmp_path, **cache)
    assert run([sys.executable, "-c", USE, str(target)], tmp_path, **cache).strip() == "fused 1"
    assert "right" in (tmp_path / "out.html").read_text(encoding="utf-8").lower()


def test_a_release_can_be_cut_from_the_changelog() -> None:
    """The version is a proper one, and what is new stands under a heading of its own, by kind."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+|\.dev\d+)?", postlude.__version__)
    headings = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert headings[0] in ("Unreleased", postlude.__version__)
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
