"""Cuts the operands of the convolution to ten bits of mantissa, as TF32 does.

Attacks: conv3d_group_norm_mean
"""

import torch
import torch.nn.functional as F
from torch import nn


def cut(x):
    bits = x.detach().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        return self.group_norm(F.conv3d(cut(x), cut(self.conv.weight), self.conv.bias)).mean(dim=[1, 2, 3, 4])
