"""Returns every second column of a wider tensor, which a caller's view() refuses.

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
        return torch.stack([y, y], 2)[:, :, 0]
