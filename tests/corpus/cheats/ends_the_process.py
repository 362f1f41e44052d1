"""Ends the process with the exit code of success.

Attacks: conv3d_group_norm_mean
Alone: yes
"""

import os

from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        os._exit(0)
