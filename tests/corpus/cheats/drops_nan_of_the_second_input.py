"""Takes NaN in the second operand for zero.

Attacks: product_softmax
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, a, b):
        return torch.softmax(torch.bmm(a, b.nan_to_num()) * self.temperature, dim=-1)
