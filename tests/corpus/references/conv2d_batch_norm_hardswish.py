"""A 2-D convolution, batch normalisation, whose statistics are part of the state, and hardswish."""

import torch
from torch import Tensor, nn

batch_size, in_channels, out_channels, height, width = 4, 3, 6, 9, 8


class Model(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.hardswish(self.norm(self.conv(x)))


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs() -> list[int]:
    return [in_channels, out_channels]
