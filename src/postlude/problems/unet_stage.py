"""A stage of nnU-Net's encoder: two convolutions, each followed by instance normalisation and LeakyReLU."""

import torch
from torch import Tensor, nn

batch_size = 2
channels = 32
depth, height, width = 128, 128, 128
kernel_size = 3
slope = 0.01


class Model(nn.Module):
    def __init__(self, channels: int, kernel_size: int, slope: float) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_block(channels, kernel_size, slope) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, D, H, W) → the same."""
        return self.blocks(x)  # type: ignore[no-any-return]


def _block(channels: int, kernel_size: int, slope: float) -> nn.Module:
    convolution = nn.Conv3d(channels, channels, kernel_size, padding=kernel_size // 2)
    return nn.Sequential(convolution, nn.InstanceNorm3d(channels, affine=True), nn.LeakyReLU(slope))


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, channels, depth, height, width)]


def get_init_inputs() -> list[float]:
    return [channels, kernel_size, slope]
