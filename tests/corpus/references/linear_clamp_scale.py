"""A linear layer, a clamp that rarely acts at default parameters, and a learnable scale per feature."""

import torch
from torch import Tensor, nn

batch_size, in_features, out_features = 40, 24, 20


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int, low: float, high: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(self.linear(x), self.low, self.high) * self.scale


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, in_features)]


def get_init_inputs() -> list[float]:
    return [in_features, out_features, -8.0, 9.0]
