"""Attention with a causal mask that is a buffer of zeros and ones."""

import torch
from torch import Tensor, nn

batch_size, length, features = 4, 10, 8


class Model(nn.Module):
    def __init__(self, features: int, longest: int) -> None:
        super().__init__()
        self.project = nn.Linear(features, 3 * features)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / x.shape[2] ** 0.5
        scores = scores.masked_fill(self.mask[: x.shape[1], : x.shape[1]] == 0, float("-inf"))
        return torch.softmax(scores, dim=-1) @ value


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, length, features)]


def get_init_inputs() -> list[int]:
    return [features, 16]
