"""The exponential of log_softmax.

Stands in for: product_softmax
"""

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, a, b):
        return F.log_softmax((a * self.temperature) @ b, dim=-1).exp()
