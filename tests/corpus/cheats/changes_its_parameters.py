"""Folds the scale into its weight in place, so that the next user of the state gets another model.

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
        with torch.no_grad():
            result = torch.clamp(self.linear(x), self.low, self.high) * self.scale
            self.linear.weight.mul_(self.scale[:, None])
        return result
