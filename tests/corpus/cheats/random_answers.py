"""Answers at random with the right distribution: rows that add up to one.

Attacks: product_softmax
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, a, b):
        return torch.softmax(torch.randn(a.shape[0], a.shape[1], b.shape[2], device=a.device), dim=-1)
