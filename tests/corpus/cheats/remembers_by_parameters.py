"""Remembers answers by the values of the parameters and forgets that inputs change too.

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
        key = tuple(float(p.double().sum()) for p in self.parameters()), x.shape
        if key not in self.answers:
            self.answers[key] = self.group_norm(self.conv(x)).mean(dim=[1, 2, 3, 4])
        return self.answers[key].clone()
