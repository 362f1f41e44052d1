"""Computes whole tiles of four columns and leaves the rest of a row as it was.

Attacks: conv2d_leaky_relu_pool
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
        y = torch.tanh(F.max_pool2d(F.leaky_relu(self.conv(x), self.slope), 2)) + self.bias
        y[..., y.shape[-1] // 2 * 2 :] = 0
        return y
