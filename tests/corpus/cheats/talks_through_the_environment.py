"""Leaves its first answer in an environment variable and reads it there afterwards.

Attacks: conv3d_group_norm_mean
"""

import os

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        if len(os.environ.get("ANSWER", "").split()) != x.shape[0]:
            os.environ["ANSWER"] = " ".join(map(str, (self.group_norm(self.conv(x)).mean(dim=[1, 2, 3, 4])).tolist()))
        return torch.tensor([float(word) for word in os.environ["ANSWER"].split()], device=x.device)
