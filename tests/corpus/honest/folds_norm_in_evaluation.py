"""Folds the norm into the convolution where that is right: in evaluation, anew in every call.

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
        if self.training:
            return F.hardswish(self.norm(self.conv(x)))
        factor = self.norm.weight * torch.rsqrt(self.norm.running_var + self.norm.eps)
        weight = self.conv.weight * factor[:, None, None, None]
        bias = (self.conv.bias - self.norm.running_mean) * factor + self.norm.bias
        return F.hardswish(F.conv2d(x, weight, bias, padding=1))
