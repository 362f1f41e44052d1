"""Takes the statistics of the norm from every second place.

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
        y = torch.relu(self.conv_transpose(x))
        groups = self.group_norm.num_groups
        some = y[..., ::2].reshape(y.shape[0], groups, -1)
        variance, mean = torch.var_mean(some, 2, correction=0)
        parts = y.reshape(y.shape[0], groups, -1)
        parts = (parts - mean[..., None]) * torch.rsqrt(variance[..., None] + self.group_norm.eps)
        weight, bias = (p.view(1, -1, 1, 1, 1) for p in (self.group_norm.weight, self.group_norm.bias))
        return parts.reshape(y.shape) * weight + bias
