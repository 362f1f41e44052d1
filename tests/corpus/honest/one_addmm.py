"""One addmm, bounds by minimum and maximum.

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
        y = torch.addmm(self.linear.bias, x, self.linear.weight.t())
        return torch.minimum(torch.maximum(y, y.new_tensor(self.low)), y.new_tensor(self.high)).mul_(self.scale)
