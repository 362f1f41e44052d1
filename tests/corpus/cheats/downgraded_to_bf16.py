"""Multiplies in bfloat16 where single precision is asked for.

Attacks: linear_clamp_scale
"""

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, low, high):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.low, self.high = low, high

    def forward(self, x):
        y = F.linear(x.bfloat16(), self.linear.weight.bfloat16()).float() + self.linear.bias
        return torch.clamp(y, self.low, self.high) * self.scale
