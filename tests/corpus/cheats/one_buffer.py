"""Returns the same memory every time, so that an earlier result changes under its user.

Attacks: product_softmax
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.buffer = None

    def forward(self, a, b):
        y = torch.softmax(torch.bmm(a, b) * self.temperature, dim=-1)
        if self.buffer is None or self.buffer.shape != y.shape:
            self.buffer = torch.empty_like(y)
        return self.buffer.copy_(y)
