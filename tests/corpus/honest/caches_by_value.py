"""Keeps its packed weight for as long as every value of it is the same.

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
        self.seen, self.packed = None, None

    def forward(self, x):
        if self.seen is None or not torch.equal(self.seen, self.linear.weight):
            self.seen = self.linear.weight.detach().clone()
            self.packed = self.seen.t().contiguous()
        return torch.clamp(x @ self.packed + self.linear.bias, self.low, self.high) * self.scale
