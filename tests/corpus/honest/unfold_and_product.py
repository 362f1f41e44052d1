"""The convolution as unfold and one matrix product.

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
        columns = F.unfold(x, 3)
        y = self.conv.weight.flatten(1) @ columns + self.conv.bias[:, None]
        y = y.view(x.shape[0], -1, x.shape[2] - 2, x.shape[3] - 2)
        return F.max_pool2d(F.leaky_relu(y, self.slope), 2).tanh() + self.bias
