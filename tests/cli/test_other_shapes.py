"""Sizes that no tile was chosen for, derived from a file's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from postlude import problem_file
from postlude.cli.other_shapes import at_other_shapes
from postlude.errors import ProblemFileError

TEXT = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose2d(4, 8, 2, stride=2)
        self.norm = {norm}

    def forward(self, x, y):
        return torch.min(self.norm(self.conv(x) + y), torch.tensor(0.5))


batch_size = 16
height, width = 6, 8


def get_inputs():
    return [torch.rand(batch_size, 4, height, width), torch.rand(batch_size, 8, 2 * height, 2 * width)]
"""


def shapes(path: Path, norm: str) -> list[tuple[int, ...]]:
    path.write_text(TEXT.format(norm=norm))
    problem = at_other_shapes(problem_file.load(path))
    inputs = problem.inputs()
    problem.run(problem.build(), inputs)
    return [tuple(item.shape) for item in inputs]


def test_batch_and_space_are_others(tmp_path: Path) -> None:
    """All inputs follow, because they are made from the same sizes."""
    assert shapes(tmp_path / "p.py", "nn.GroupNorm(2, 8)") == [(11, 4, 5, 7), (11, 8, 10, 14)]


def test_a_model_that_takes_no_other_space_gets_another_batch(tmp_path: Path) -> None:
    assert shapes(tmp_path / "p.py", "nn.LayerNorm(16)") == [(11, 4, 6, 8), (11, 8, 12, 16)]


def test_a_file_without_sizes_says_so(tmp_path: Path) -> None:
    text = TEXT.format(norm="nn.Identity()").split("batch_size = 16")[0]
    (tmp_path / "p.py").write_text(text + "def get_inputs():\n    return [torch.rand(2, 4, 6, 8)]\n")
    with pytest.raises(ProblemFileError, match="no sizes of its own"):
        at_other_shapes(problem_file.load(tmp_path / "p.py"))
    assert torch.get_default_device().type == "cpu"
