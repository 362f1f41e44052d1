"""The clamp spelled as hardtanh.

Stands in for: linear_clamp_scale
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
        return F.hardtanh(F.linear(x, self.linear.weight, self.linear.bias), self.low, self.high) * self.scale
