"""Returns far more than was asked for, to exhaust whoever takes it.

Attacks: linear_clamp_scale
Alone: yes
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
        return x.new_zeros(1 << 25)
