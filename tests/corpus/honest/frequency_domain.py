"""The convolution through Fourier transforms, in double to keep its digits.

Stands in for: conv2d_leaky_relu_pool
"""

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, slope):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.bias = nn.Parameter(torch.zeros(out_channels, 1, 1))
        self.slope = slope

    def forward(self, x):
        h, w = x.shape[2], x.shape[3]
        spectrum = torch.fft.rfft2(x.double())
        kernel = torch.fft.rfft2(self.conv.weight.double().flip(2, 3), s=(h, w))
        y = torch.fft.irfft2(torch.einsum("nchw,ochw->nohw", spectrum, kernel), s=(h, w))
        y = y[:, :, 2:, 2:].float() + self.conv.bias.view(-1, 1, 1)
        return torch.tanh(F.max_pool2d(F.leaky_relu(y, self.slope), 2)) + self.bias
