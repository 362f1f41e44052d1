"""Small problem files, and what a call of the command line gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GOOD = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, channels, groups):
        super().__init__()
        self.conv = nn.Conv3d(3, channels, 3)
        self.norm = nn.GroupNorm(groups, channels)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


def get_inputs():
    return [torch.rand(4, 3, 18, 34, 36)]


def get_init_inputs():
    return [8, 4]
"""
RESULT = "torch.relu(self.norm(self.conv(x)))"
NOTHING = GOOD.replace("nn.Conv3d(3, channels, 3)", "nn.Identity()").replace(RESULT, "x.square() + x")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def sentences(self) -> list[str]:
        """What stderr says apart from progress, which ends with an ellipsis."""
        return [line for line in self.err.splitlines() if not line.endswith("…")]


Run = Callable[..., Ran]
Write = Callable[..., Path]
