"""Multiplies exactly and keeps its running sum in half precision.

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
        total = x.new_zeros(x.shape[0], self.linear.out_features, dtype=torch.float16)
        for k in range(x.shape[1]):
            total += (x[:, k : k + 1] * self.linear.weight[:, k]).half()
        return torch.clamp(total.float() + self.linear.bias, self.low, self.high) * self.scale
