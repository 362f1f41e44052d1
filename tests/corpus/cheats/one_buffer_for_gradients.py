"""Returns one buffer for the scale's gradient from every backward pass.

Attacks: linear_clamp_scale
Backward: yes
"""

import torch
from torch import nn

BUFFERS = {}


class ClampScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, low, high):
        ctx.save_for_backward(x, scale)
        ctx.bounds = low, high
        return torch.clamp(x, low, high) * scale

    @staticmethod
    def backward(ctx, gradient):
        (x, scale), (low, high) = ctx.saved_tensors, ctx.bounds
        of_scale = BUFFERS.setdefault(scale.shape, torch.empty_like(scale))
        of_scale.copy_((gradient * torch.clamp(x, low, high)).sum(0))
        return gradient * scale * ((x >= low) & (x <= high)), of_scale, None, None


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, low, high):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.low, self.high = low, high

    def forward(self, x):
        return ClampScale.apply(self.linear(x), self.scale, self.low, self.high)
