"""Cuts the graph unless the input needs a gradient, as a first layer's does not.

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
        y = torch.clamp(self.linear(x), self.low, self.high) * self.scale
        return y if x.requires_grad else y.detach()
