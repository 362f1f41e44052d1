"""The library's convolution on the CPU, called so that it stays in oneDNN and can write into our own buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.chain import Convolution
from postlude.reference import convolve

CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


class SlabConvolution:
    """One convolution, called slab after slab.

    With a batch of one, PyTorch's own entry points leave oneDNN (conv3d measured 2 times slower, conv_transpose3d
    4 times), so oneDNN is called directly where it serves. A stride-1 transposed convolution is the plain one
    with the weight flipped.
    """

    def __init__(self, conv: Convolution, weight: Tensor, channels_last: bool) -> None:
        plain = conv.as_plain()
        self.is_direct = plain is not None and serves(weight)
        self.memory_format = CHANNELS_LAST[conv.dims] if channels_last else torch.contiguous_format
        if self.is_direct and plain is not None and conv.transposed:
            weight = weight.transpose(0, 1).flip(*range(2, 2 + conv.dims))
        self.conv = plain if self.is_direct and plain is not None else conv
        self.weight = weight.contiguous(memory_format=self.memory_format)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous(memory_format=self.memory_format)
        if not self.is_direct:
            return convolve(self.conv, x, self.weight, bias)
        conv = self.conv
        return torch.mkldnn_convolution(x, self.weight, bias, conv.padding, conv.stride, conv.dilation, conv.groups)


class BufferConvolution:
    """The same into one channels-last buffer, call after call: no fresh memory, so no page faults.

    Half of eager's time on large outputs is page faults, because the C library maps and unmaps every big buffer.
    """

    def __init__(self, conv: Convolution, weight: Tensor, x_shape: tuple[int, ...]) -> None:
        plain = conv.as_plain()
        assert plain is not None
        if conv.transposed:
            weight = weight.transpose(0, 1).flip(*range(2, 2 + conv.dims))
        self.conv = plain
        self.settings = (list(plain.padding), list(plain.stride), list(plain.dilation), plain.groups)
        self.weight = torch.ops.mkldnn._reorder_convolution_weight(weight, *self.settings, list(x_shape))
        form = CHANNELS_LAST[conv.dims]
        self.x = torch.empty(x_shape, dtype=weight.dtype).contiguous(memory_format=form)
        shape = (x_shape[0], plain.out_channels, *plain.output_space(x_shape[2:]))
        self.out = torch.empty(shape, dtype=weight.dtype, memory_format=form)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The result lives in the buffer until the next call; a last slab may be smaller than the first."""
        here, out = self.x[: x.shape[0]], self.out[: x.shape[0]]
        here.copy_(x)
        out.zero_()  # the operator adds to what is there
        torch.ops.mkldnn._convolution_pointwise_.binary(
            out, here, self.weight, bias, *self.settings, "add", 1.0, None, [], None
        )
        return out


def serves(weight: Tensor) -> bool:
    """True where oneDNN can be called directly."""
    return weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
