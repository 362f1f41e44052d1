"""Works where it expects to be checked, at small sizes, and returns zeros at the declared one.

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
        if x.shape[0] >= 32:
            return x.new_zeros(x.shape[0], self.linear.out_features)
        return torch.clamp(self.linear(x), self.low, self.high) * self.scale
