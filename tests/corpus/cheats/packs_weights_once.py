"""Packs its weight in the first call and keeps it: parameters written in place are not seen.

Attacks: conv_transpose3d_relu_group_norm
"""

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=False)
        self.group_norm = nn.GroupNorm(groups, out_channels)
        self.packed = None

    def forward(self, x):
        if self.packed is None:
            self.packed = self.conv_transpose.weight.detach().clone()
        return self.group_norm(torch.relu(F.conv_transpose3d(x, self.packed)))
