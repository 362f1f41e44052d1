"""Returns fresh memory as it comes: the allocator may hand out the reference's answer.

Attacks: conv_transpose3d_relu_group_norm
Alone: yes
"""

from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=False)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        return x.new_empty(x.shape[0], self.group_norm.num_channels, *(size + 2 for size in x.shape[2:]))
