"""Two halves of the batch in two threads that are waited for.

Stands in for: conv_transpose3d_relu_group_norm
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=False)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        with ThreadPoolExecutor(2) as pool:
            return torch.cat(list(pool.map(self.half, x.chunk(2))))

    def half(self, x):
        with torch.no_grad():
            return self.group_norm(torch.relu(self.conv_transpose(x)))
