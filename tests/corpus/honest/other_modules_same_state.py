"""Other classes with the same names of parameters and buffers.

Stands in for: conv2d_batch_norm_hardswish
"""

import torch
import torch.nn.functional as F
from torch import nn


class Holder(nn.Module):
    """Parameters and buffers without a forward of their own."""

    def __init__(self, parameters, buffers=None):
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        one, zero = torch.ones(out_channels), torch.zeros(out_channels)
        self.conv = Holder({"weight": torch.randn(out_channels, in_channels, 3, 3), "bias": zero.clone()})
        running = {"running_mean": zero.clone(), "running_var": one.clone(), "num_batches_tracked": torch.tensor(0)}
        self.norm = Holder({"weight": one.clone(), "bias": zero.clone()}, running)

    def forward(self, x):
        y = F.conv2d(x, self.conv.weight, self.conv.bias, padding=1)
        norm = self.norm
        if self.training:
            norm.num_batches_tracked += 1
        y = F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training, 0.1, 1e-5)
        return F.hardswish(y)
