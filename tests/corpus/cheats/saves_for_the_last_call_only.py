"""Keeps what its backward pass needs in one place for all calls, so a second call before it overwrites the first's.

Attacks: linear_clamp_scale
Backward: yes
"""

import torch
from torch import nn

SAVED = {}


class ClampScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, low, high):
        SAVED.update(x=x.detach(), scale=scale.detach())
        ctx.bounds = low, high
        return torch.clamp(x, low, high) * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = SAVED["x"], SAVED["scale"]
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
