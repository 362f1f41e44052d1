"""Batch norm by hand in both modes, running statistics included.

Stands in for: conv2d_batch_norm_hardswish
"""

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x):
        y, norm = self.conv(x), self.norm
        if self.training:
            variance, mean = torch.var_mean(y, (0, 2, 3), correction=0)
            count = y.numel() // y.shape[1]
            with torch.no_grad():
                norm.num_batches_tracked += 1
                norm.running_mean.lerp_(mean, norm.momentum)
                norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
        else:
            variance, mean = norm.running_var, norm.running_mean
        factor = norm.weight * torch.rsqrt(variance + norm.eps)
        y = (y - mean.view(-1, 1, 1)) * factor.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
        return y * F.relu6(y + 3) / 6
