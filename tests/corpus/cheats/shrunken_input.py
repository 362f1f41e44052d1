"""Computes one sample and repeats it for the rest of the batch.

Attacks: conv_transpose3d_relu_group_norm
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=False)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        y = self.group_norm(torch.relu(self.conv_transpose(x[:1])))
        return y.expand(x.shape[0], -1, -1, -1, -1).contiguous()
