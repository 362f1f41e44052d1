"""Uses the second input of its first call from then on.

Attacks: product_softmax
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.b = None

    def forward(self, a, b):
        if self.b is None or self.b.shape != b.shape:
            self.b = b.clone()
        return torch.softmax(torch.bmm(a, self.b) * self.temperature, dim=-1)
