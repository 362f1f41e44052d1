"""The norm's backward pass by its closed form, the convolution's by PyTorch.

Stands in for: conv_transpose3d_relu_group_norm
Backward: yes
"""

import torch
from torch import nn


class Standardise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        variance, mean = torch.var_mean(x, 2, correction=0, keepdim=True)
        factor = torch.rsqrt(variance + eps)
        result = (x - mean) * factor
        ctx.save_for_backward(result, factor)
        return result

    @staticmethod
    def backward(ctx, grad):
        result, factor = ctx.saved_tensors
        along = (grad * result).mean(2, keepdim=True)
        return (grad - grad.mean(2, keepdim=True) - result * along) * factor, None


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=False)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x):
        y = torch.relu(self.conv_transpose(x))
        norm = self.group_norm
        y = Standardise.apply(y.reshape(y.shape[0], norm.num_groups, -1), norm.eps).reshape(y.shape)
        return y * norm.weight.view(1, -1, 1, 1, 1) + norm.bias.view(1, -1, 1, 1, 1)
