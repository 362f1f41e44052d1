"""Computes the input's gradient in the memory of the gradient that it is given, which others may read.

Attacks: linear_clamp_scale
Backward: yes
"""

import torch
from torch import nn


class ClampScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, low, high):
        ctx.save_for_backward(x, scale)
        ctx.bounds = low, high
        return torch.clamp(x, low, high) * scale

    @staticmethod
    def backward(ctx, gradient):
        (x, scale), (low, high) = ctx.saved_tensors, ctx.bounds
        of_scale = (gradient * torch.clamp(x, low, high)).sum(0)
        return gradient.mul_(scale * ((x >= low) & (x <= high))), of_scale, None, None


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, low, high):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.low, self.high = low, high

    def forward(self, x):
        return ClampScale.apply(self.linear(x), self.scale, self.low, self.high)
