"""One multiplication and one addition per place, from statistics in double.

Stands in for: conv_transpose3d_relu_group_norm
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
        norm, n, c = self.group_norm, y.shape[0], y.shape[1]
        variance, mean = torch.var_mean(y.double().reshape(n, norm.num_groups, -1), dim=2, correction=0)
        factor = torch.rsqrt(variance + norm.eps).repeat_interleave(c // norm.num_groups, 1) * norm.weight
        offset = norm.bias - mean.repeat_interleave(c // norm.num_groups, 1) * factor
        shape = (n, c, 1, 1, 1)
        return torch.addcmul(offset.float().view(shape), y, factor.float().view(shape))
