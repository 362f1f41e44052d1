"""Scales its weight in place in every call in evaluation mode, as a norm that is folded again and again would.

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
        y = torch.clamp(self.linear(x), self.low, self.high) * self.scale
        if not self.training:
            self.linear.weight.data.mul_(1.001)
        return y
