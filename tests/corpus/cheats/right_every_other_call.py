"""Works in the first of two calls and adds a little in the second, as a lost update would.

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
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return (torch.clamp(self.linear(x), self.low, self.high) * self.scale) * (1.0 if self.calls % 2 else 1.001)
