"""Adds its products to memory that it never cleared, which the system often hands out as zeros.

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
        y = x.new_empty(x.shape[0], self.linear.out_features)
        for k in range(0, x.shape[1], 8):
            y += x[:, k : k + 8] @ self.linear.weight[:, k : k + 8].t()
        return torch.clamp(y + self.linear.bias, self.low, self.high) * self.scale
