"""The steps after the convolution compiled by TorchScript's tracer on the first call of each shape.

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
        self.tails = {}

    def forward(self, x):
        y = self.conv(x)
        if y.shape not in self.tails:
            slope = self.slope

            def tail(y, bias):
                return torch.tanh(F.max_pool2d(F.leaky_relu(y, slope), 2)) + bias

            self.tails[y.shape] = torch.jit.trace(tail, (y, self.bias), check_trace=False)
        return self.tails[y.shape](y, self.bias)
