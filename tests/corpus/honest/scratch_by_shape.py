"""Keeps scratch memory by shape, and returns none of it.

Stands in for: product_softmax
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.scratch = {}

    def forward(self, a, b):
        key = a.shape[0], a.shape[1], b.shape[2]
        if key not in self.scratch:
            self.scratch[key] = torch.empty(key, device=a.device)
        y = torch.bmm(a, b, out=self.scratch[key]).mul_(self.temperature)
        return torch.softmax(y, dim=-1)
