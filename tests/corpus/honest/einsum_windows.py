"""The convolution as an einsum over strided windows.

Stands in for: conv2d_leaky_relu_pool
"""

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, slope):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.bias = nn.Parameter(torch.zeros(out_channels, 1, 1))
        self.slope = slope

    def forward(self, x):
        windows = x.unfold(2, 3, 1).unfold(3, 3, 1)
        y = torch.einsum("nchwij,ocij->nohw", windows, self.conv.weight) + self.conv.bias.view(-1, 1, 1)
        y = torch.where(y >= 0, y, self.slope * y)
        return torch.tanh(F.max_pool2d(y.contiguous(), 2)) + self.bias
