"""Its ReLU compares and selects, which turns NaN into 0 and hides a diverged model.

Attacks: conv_transpose3d_relu_group_norm
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=False)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        y = self.conv_transpose(x)
        return self.group_norm(torch.where(y > 0, y, torch.zeros_like(y)))
