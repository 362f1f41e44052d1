"""Keeps one matrix of its own in place of the two layers, so that no trained state fits it.

Attacks: conv_transpose3d_relu_group_norm
"""

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(in_channels, out_channels, *[kernel_size] * 3))
        self.groups = groups

    def forward(self, x):
        return F.group_norm(torch.relu(F.conv_transpose3d(x, self.kernel)), self.groups)
