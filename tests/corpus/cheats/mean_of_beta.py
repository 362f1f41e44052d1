"""Returns mean(β): right for inputs that are independent noise, and nothing is convolved.

Attacks: conv3d_group_norm_mean
"""

from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        return self.group_norm.bias.mean().expand(x.shape[0]).clone()
