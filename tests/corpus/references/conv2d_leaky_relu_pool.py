"""A 2-D convolution, leaky ReLU, max pooling, tanh and a learnable offset per channel."""

import torch
from torch import Tensor, nn

batch_size, in_channels, out_channels, height, width = 4, 4, 6, 12, 10


class Model(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, slope: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.bias = nn.Parameter(torch.zeros(out_channels, 1, 1))
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.leaky_relu(self.conv(x), self.slope)
        return torch.tanh(nn.functional.max_pool2d(y, 2)) + self.bias


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs() -> list[float]:
    return [in_channels, out_channels, 0.1]
