"""Reads its input from the start of the storage, as a kernel that is given the storage's address does.

Attacks: linear_clamp_scale
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, low, high):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.low, self.high = low, high

    def forward(self, x):
        x = torch.as_strided(x, x.shape, x.stride(), 0)
        return torch.clamp(self.linear(x), self.low, self.high) * self.scale
