"""A Triton kernel for everything after the product.

Stands in for: linear_clamp_scale
Interpreted: yes
"""

import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def clamp_scale(y_ptr, scale_ptr, out_ptr, columns, low, high, BLOCK: tl.constexpr):  # noqa: N803
    row, place = tl.program_id(0), tl.arange(0, BLOCK)
    inside = place < columns
    y = tl.load(y_ptr + row * columns + place, mask=inside)
    y = tl.where(y < low, low, tl.where(y > high, high, y))
    tl.store(out_ptr + row * columns + place, y * tl.load(scale_ptr + place, mask=inside), mask=inside)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, low, high):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.low, self.high = low, high

    def forward(self, x):
        y = torch.addmm(self.linear.bias, x, self.linear.weight.t())
        result = torch.empty_like(y)
        clamp_scale[(y.shape[0],)](y, self.scale, result, y.shape[1], self.low, self.high, BLOCK=32)
        return result
