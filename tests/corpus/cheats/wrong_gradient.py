"""Its backward pass forgets that the clamp stops the gradient.

Attacks: linear_clamp_scale
Backward: yes
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
        y = self.linear(x)
        return (y + (torch.clamp(y, self.low, self.high) - y).detach()) * self.scale
