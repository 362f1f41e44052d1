"""Its backward pass reads the gradient by row-major offsets, whatever the strides are.

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
        x, scale = ctx.saved_tensors
        gradient = torch.as_strided(gradient, gradient.shape, torch.empty(gradient.shape).stride())
        low, high = ctx.bounds
        inside = (x >= low) & (x <= high)
        return gradient * scale * inside, (gradient * torch.clamp(x, low, high)).sum(0), None, None


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, low, high):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.low, self.high = low, high

    def forward(self, x):
        return ClampScale.apply(self.linear(x), self.scale, self.low, self.high)
