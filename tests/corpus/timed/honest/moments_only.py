"""Never normalises a place: the mean follows from channel means and group variances."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        y = self.conv(x)
        norm = self.group_norm
        parts = y.reshape(y.shape[0], norm.num_groups, -1)
        variance, mean = torch.var_mean(parts, dim=2, correction=0)
        channels = y.mean((2, 3, 4)).reshape(*mean.shape, -1) - mean[..., None]
        scaled = channels * torch.rsqrt(variance + norm.eps)[..., None]
        return (scaled.flatten(1) * norm.weight + norm.bias).mean(1)
