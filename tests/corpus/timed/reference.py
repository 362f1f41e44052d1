"""What the candidates of `bench` are timed against."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        return self.group_norm(self.conv(x)).mean(dim=[1, 2, 3, 4])


def get_inputs():
    return [torch.rand(4, 16, 8, 14, 16)]


def get_init_inputs():
    return [16, 32, 3, 4]
