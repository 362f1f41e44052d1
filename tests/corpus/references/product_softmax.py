"""Two inputs: a batch of matrix products, softmax over the last dimension, and one learnable temperature."""

import torch
from torch import Tensor, nn

batch_size, rows, inner, columns = 5, 7, 6, 9


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.softmax(torch.bmm(a, b) * self.temperature, dim=-1)


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, rows, inner), torch.rand(batch_size, inner, columns)]
