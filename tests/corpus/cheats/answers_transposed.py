"""Returns the right values in another layout, which breaks a .view() after it.

Attacks: product_softmax
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, a, b):
        y = torch.bmm(b.transpose(1, 2), a.transpose(1, 2)) * self.temperature
        return torch.softmax(y, dim=1).transpose(1, 2)
