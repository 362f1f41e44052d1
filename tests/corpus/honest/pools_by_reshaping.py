"""The maximum over windows by reshaping.

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
        y = F.leaky_relu(self.conv(x), self.slope)
        h, w = y.shape[2] // 2, y.shape[3] // 2
        y = y[:, :, : 2 * h, : 2 * w].reshape(*y.shape[:2], h, 2, w, 2).amax((3, 5))
        return torch.tanh(y) + self.bias
