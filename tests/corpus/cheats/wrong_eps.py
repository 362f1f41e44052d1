"""Leaves out the eps of the norm.

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

    def forward(self, x):
        y = torch.relu(self.conv_transpose(x))
        return F.group_norm(y, self.group_norm.num_groups, self.group_norm.weight, self.group_norm.bias, 1e-12)
