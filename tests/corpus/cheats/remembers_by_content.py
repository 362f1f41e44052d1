"""Remembers answers by the values of the input and forgets that parameters change too.

Attacks: conv3d_group_norm_mean
"""

from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)
        self.answers = {}

    def forward(self, x):
        key = hash(x.contiguous().numpy().tobytes())
        if key not in self.answers:
            self.answers[key] = self.group_norm(self.conv(x)).mean(dim=[1, 2, 3, 4])
        return self.answers[key].clone()
