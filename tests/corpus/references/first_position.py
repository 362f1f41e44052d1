"""A linear layer of which the first position is taken: the result is a view with gaps."""

import torch
from torch import Tensor, nn

batch_size, length, in_features, out_features = 5, 7, 6, 8


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, 0]


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, length, in_features)]


def get_init_inputs() -> list[int]:
    return [in_features, out_features]
