"""Exported files of linear layers whose input has more than two axes; interpreted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from export.exporting import Problem, export_text, ruff
from export.test_dropouts import assert_like_the_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of the interpreter, about infinities

# As many tokens as features, because a problem's first argument is its second axis.
BLOCK = Problem(
    "block",
    "self.first = nn.Linear(cin, cout); self.second = nn.Linear(cout, cin); self.norm = nn.LayerNorm(cin); "
    "self.drop = nn.Dropout(0.2)",
    "return self.norm(x + self.drop(self.second(F.gelu(self.first(x)))))",
    (2, 16, 16),
    24,
    ("linear_kernel",),
)
SUM = replace(
    BLOCK,
    name="sum",
    init="self.first = nn.Linear(cin, cout)",
    forward="x = x.transpose(0, 1); return torch.logsumexp(self.first(x), dim=-1)",
)


def test_a_file_of_rows_is_laid_out(tmp_path: Path) -> None:
    made, _, _ = export_text(BLOCK.text, tmp_path)
    (tmp_path / "file.py").write_text(made.text, encoding="utf-8")
    assert ruff(tmp_path / "file.py") == ""
    assert [chain.given[0].shape for chain in made.chains] == [(32, 16), (32, 24)]
    assert made.text.count(".unflatten(0, x.shape[:-1])") == 1
    assert "mask.reshape(-1, mask.shape[-1])" in made.text


@pytest.mark.interpret
@pytest.mark.parametrize("problem", [BLOCK, SUM], ids=["block", "sum"])
def test_a_file_computes_what_the_model_does(problem: Problem, tmp_path: Path) -> None:
    assert_like_the_model(problem, tmp_path)


@pytest.mark.interpret
def test_rows_in_another_order_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_like_the_model(SUM, tmp_path, ("x.reshape(-1", "x.transpose(0, 1).reshape(-1"))
