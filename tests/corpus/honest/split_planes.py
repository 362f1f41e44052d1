"""Products in three half-precision pieces of each operand, as exact as single precision.

Stands in for: linear_clamp_scale
"""

import torch
from torch import nn


def planes(x):
    high = x.bfloat16().float()
    middle = (x - high).bfloat16().float()
    return high, middle, (x - high - middle).bfloat16().float()


def pairs(a, b):
    return [(a[i], b[j]) for total in (2, 1, 0) for i in range(3) for j in range(3) if i + j == total]


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, low, high):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.low, self.high = low, high

    def forward(self, x):
        y = sum(a @ b.t() for a, b in pairs(planes(x), planes(self.linear.weight)))
        return torch.clamp(y + self.linear.bias, self.low, self.high) * self.scale
