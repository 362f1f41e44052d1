"""Takes the variance as E[x²] − E[x]², which loses every digit at a large mean.

Attacks: conv3d_group_norm_mean
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        y = self.conv(x)
        parts = y.reshape(y.shape[0], self.group_norm.num_groups, -1)
        mean = parts.mean(2, keepdim=True)
        variance = (parts.square().mean(2, keepdim=True) - mean.square()).clamp(min=0)
        parts = (parts - mean) * torch.rsqrt(variance + self.group_norm.eps)
        weight, bias = (p.view(1, -1, 1, 1, 1) for p in (self.group_norm.weight, self.group_norm.bias))
        return (parts.reshape(y.shape) * weight + bias).mean(dim=[1, 2, 3, 4])
