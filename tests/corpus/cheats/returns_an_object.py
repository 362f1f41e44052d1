"""Returns an object that would run code where it is unpickled.

Attacks: linear_clamp_scale
"""

import os

import torch
from torch import nn


class Trap:
    def __reduce__(self):
        return os.system, ("touch unpickled",)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, low, high):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.low, self.high = low, high

    def forward(self, x):
        return Trap()
