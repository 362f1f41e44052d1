"""Uses the batch's own statistics in evaluation too, and updates nothing.

Attacks: conv2d_batch_norm_hardswish
"""

import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x):
        return F.hardswish(F.batch_norm(self.conv(x), None, None, self.norm.weight, self.norm.bias, training=True))
