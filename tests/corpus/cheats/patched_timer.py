"""Makes every clock of the process stand still and does no work.

Attacks: conv3d_group_norm_mean
Alone: yes
"""

import time

import torch
from torch import nn

for clock in ("time", "perf_counter", "perf_counter_ns", "monotonic", "process_time"):
    setattr(time, clock, lambda: 0)
torch.cuda.Event.elapsed_time = lambda self, other: 1e-6
torch.cuda.synchronize = lambda *args: None


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        return x.new_zeros(x.shape[0])
