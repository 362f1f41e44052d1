"""Kernels without what is proven to change nothing give the bits of those with it, by Triton's interpreter."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from export.exporting import SMALL_CARD, SMALL_PROBLEMS, Problem, export_text
from postlude.export.device.proved import Launch
from postlude.export.export_model import Export
from postlude.export.syntax.facts import Fact
from postlude.export.syntax.proven import _Proven
from postlude.export.syntax.specialise import simplify

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
# Sizes of powers of two, where masks hold, and others, where they do not.
EVEN = Problem(
    "even",
    "self.conv = nn.ConvTranspose3d(cin, cout, 3, padding=1, bias=False); self.norm = nn.GroupNorm(8, cout)",
    "return self.norm(torch.relu(self.conv(x)))",
    (2, 64, 4, 4, 32),
    64,
    (),
)
LINEAR = Problem(
    "linear",
    "self.linear = nn.Linear(cin, cout); self.norm = nn.BatchNorm1d(cout)",
    "return self.norm(self.linear(x) * 2.0)",
    (32, 128),
    64,
    (),
)
NAMES = ("61", "windows of channels that leave lanes", "logsumexp over channels that leave lanes", "layer_norm")
PROBLEMS = [EVEN, LINEAR, *[problem for problem in SMALL_PROBLEMS if problem.name in NAMES]]


def results(made: Export, folder: Path, name: str) -> list[torch.Tensor]:
    """What the chains of a file give by their kernels, each for the same numbers."""
    path = folder / f"{name}.py"
    path.write_text(made.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = []
    for chain in made.chains:
        drawn = torch.Generator().manual_seed(0)
        given = [torch.randn(b.shape, generator=drawn, dtype=getattr(torch, b.dtype)) for b in chain.given]
        with torch.no_grad():
            found.append(getattr(module, chain.name)(*given))
    return found


def exported(problem: Problem, folder: Path) -> Export:
    return export_text(problem.text, folder, machine=SMALL_CARD)[0]


def bits(result: torch.Tensor) -> bytes:
    return bytes(result.contiguous().view(torch.uint8).numpy().tobytes())


def both(
    problem: Problem, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[Any], Export, Export]:
    shorter = exported(problem, folder)
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "simplify", lambda self, function, given=None, joins=True: simplify(function))
        whole = exported(problem, folder)
    one, other = results(shorter, folder, "shorter"), results(whole, folder, "whole")
    return list(map(bits, one)), list(map(bits, other)), shorter, whole


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_gives_the_same_bits(problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, shorter, whole = both(problem, tmp_path, monkeypatch)
    assert one == other
    assert shorter.text.count("mask=") < whole.text.count("mask=")
    assert shorter.text.count("int64") < whole.text.count("int64")


def test_a_condition_that_does_not_hold_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: of a choice between lanes and a number, the lanes are always taken."""
    honest = _Proven._where

    def always(self: _Proven, node: ast.Call, fact: Fact) -> ast.expr:
        yes = node.args[1]
        return yes if self._stands_for(yes, fact) else honest(self, node, fact)

    monkeypatch.setattr(_Proven, "_where", always)
    one, other, *_ = both(EVEN, tmp_path, monkeypatch)
    assert one != other
