"""Works channels-last inside and hands back what the reference hands back.

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
        keeps = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        y = self.conv(x.contiguous(memory_format=torch.channels_last))
        y = torch.tanh(F.max_pool2d(F.leaky_relu(y, self.slope), 2)) + self.bias
        return y if keeps else y.contiguous()
