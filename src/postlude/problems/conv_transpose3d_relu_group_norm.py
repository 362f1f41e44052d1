"""A transposed 3-D convolution without bias, then ReLU, then group normalisation."""

import torch
from torch import Tensor, nn

batch_size = 16
in_channels = 64
out_channels = 128
depth = height = width = 32
kernel_size = 3
groups = 8


class Model(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=False)
        self.relu = nn.ReLU()
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, D, H, W) → (N, C_out, D + 2, H + 2, W + 2) for a kernel of 3."""
        return self.group_norm(self.relu(self.conv_transpose(x)))  # type: ignore[no-any-return]


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, in_channels, depth, height, width)]


def get_init_inputs() -> list[int]:
    return [in_channels, out_channels, kernel_size, groups]
