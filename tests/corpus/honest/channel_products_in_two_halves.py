"""The sum over features in two halves: another order of additions.

Stands in for: linear_clamp_scale
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
        half = x.shape[1] // 2
        y = x[:, :half] @ self.linear.weight[:, :half].t() + x[:, half:] @ self.linear.weight[:, half:].t()
        return (y + self.linear.bias).clamp(self.low, self.high) * self.scale
