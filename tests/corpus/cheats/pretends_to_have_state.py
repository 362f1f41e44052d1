"""Shows the right state_dict and computes with parameters that it hides.

Attacks: conv3d_group_norm_mean
"""

from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)
        self.hidden = [
            nn.Sequential(nn.Conv3d(in_channels, out_channels, kernel_size), nn.GroupNorm(groups, out_channels))
        ]

    def forward(self, x):
        return self.hidden[0](x).mean(dim=[1, 2, 3, 4])

    def state_dict(self, *args, **options):
        return {key: value.clone() for key, value in super().state_dict(*args, **options).items()}
