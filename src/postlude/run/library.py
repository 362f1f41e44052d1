"""The library's convolution on the CPU, called so that it stays in oneDNN, in the layout that suits it."""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.chain import Convolution

CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


class DirectConvolution:
    """oneDNN's convolution, called slab after slab.

    With a batch of one, PyTorch's own entry points may leave oneDNN (conv3d measured 2 to 13 times slower).
    """

    def __init__(self, conv: Convolution, weight: Tensor, channels_last: bool) -> None:
        self.conv, weight = _plain(conv, weight)
        self.memory_format = CHANNELS_LAST[conv.dims] if channels_last else torch.contiguous_format
        self.weight = weight.contiguous(memory_format=self.memory_format)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x, conv = x.contiguous(memory_format=self.memory_format), self.conv
        return torch.mkldnn_convolution(x, self.weight, bias, conv.padding, conv.stride, conv.dilation, conv.groups)


def _plain(conv: Convolution, weight: Tensor) -> tuple[Convolution, Tensor]:
    """A stride-1 transposed convolution is the plain one with the weight's channels swapped and its taps flipped."""
    plain = conv.as_plain()
    if plain is None:
        raise ValueError(f"{conv} has no plain form")
    return plain, weight.transpose(0, 1).flip(*range(2, 2 + conv.dims)) if conv.transposed else weight
