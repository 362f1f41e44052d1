"""A function of its own with a backward pass of its own.

Stands in for: linear_clamp_scale
Backward: yes
"""

import torch
from torch import nn


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, scale, low, high):
        y = torch.addmm(bias, x, weight.t())
        ctx.save_for_backward(x, weight, y, scale)
        ctx.low, ctx.high = low, high
        return y.clamp(low, high) * scale

    @staticmethod
    def backward(ctx, grad):
        x, weight, y, scale = ctx.saved_tensors
        inside = (y >= ctx.low) & (y <= ctx.high)
        inner = grad * scale * inside
        return inner @ weight, inner.t() @ x, inner.sum(0), (grad * y.clamp(ctx.low, ctx.high)).sum(0), None, None


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, low, high):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.low, self.high = low, high

    def forward(self, x):
        return Fused.apply(x, self.linear.weight, self.linear.bias, self.scale, self.low, self.high)
