"""Returns zeros, which is what the chain gives at default parameters, rounding aside.

Attacks: conv3d_group_norm_mean
"""

from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        return x.new_zeros(x.shape[0])
