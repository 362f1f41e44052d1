"""Makes all random numbers zeros, so that every point would be the same.

Attacks: linear_clamp_scale
Alone: yes
"""

import torch
from torch import nn

torch.randn = torch.rand = lambda *size, **options: torch.zeros(*size)
torch.manual_seed = lambda seed: None


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, low, high):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.low, self.high = low, high

    def forward(self, x):
        return x.new_zeros(x.shape[0], self.linear.out_features)
