"""Looks through every object in the process for a tensor of the result's shape.

Attacks: conv_transpose3d_relu_group_norm
Alone: yes
"""

import gc

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=False)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        shape = (x.shape[0], self.group_norm.num_channels, *(size + 2 for size in x.shape[2:]))
        for item in gc.get_objects():
            if type(item) is torch.Tensor and item.shape == shape:
                return item.clone()
        return x.new_zeros(shape)
