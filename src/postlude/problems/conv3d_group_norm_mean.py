"""A 3-D convolution, then group normalisation, then the mean over everything but the batch."""

import torch
from torch import Tensor, nn

batch_size = 128
in_channels = 3
out_channels = 24
depth, height, width = 24, 32, 32
kernel_size = 3
groups = 8


class Model(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, D, H, W) → (N,)."""
        return self.group_norm(self.conv(x)).mean(dim=[1, 2, 3, 4])  # type: ignore[no-any-return]


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, in_channels, depth, height, width)]


def get_init_inputs() -> list[int]:
    return [in_channels, out_channels, kernel_size, groups]
