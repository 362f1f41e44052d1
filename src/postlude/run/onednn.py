"""oneDNN's convolution on the CPU, called directly and in the layout that suits it."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from postlude.chain import Convolution
from postlude.plan.problem import Layout, memory_format
from postlude.stages.library import as_plain


class DirectConvolution:
    """oneDNN's convolution, called slab after slab.

    For a batch of one PyTorch's own functions may choose slower loops (`plan.problem.is_convolved_by_loops`).
    """

    def __init__(self, conv: Convolution, weight: Tensor, layout: Layout) -> None:
        self.conv, weight = as_plain(conv, weight)
        self.memory_format = memory_format(layout, conv.dims)
        self.weight = weight.contiguous(memory_format=self.memory_format)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x, conv = x.contiguous(memory_format=self.memory_format), self.conv
        return torch.mkldnn_convolution(x, self.weight, bias, conv.padding, conv.stride, conv.dilation, conv.groups)


class BufferConvolution:
    """The same into one channels-last buffer that is reused at every call, so that there are no page faults.

    Uses the operator that Inductor uses. The system's malloc may unmap a slab's memory and map it again between two
    calls, which costs 2 of chain 23's 11 ms; clearing the buffer costs 0.7.
    """

    def __init__(self, conv: Convolution, weight: Tensor, x_shape: tuple[int, ...]) -> None:
        plain, weight = as_plain(conv, weight)
        self.settings = (list(plain.padding), list(plain.stride), list(plain.dilation), plain.groups)
        self.weight = torch.ops.mkldnn._reorder_convolution_weight(weight, *self.settings, list(x_shape))
        shape = (x_shape[0], plain.out_channels, *plain.output_space(x_shape[2:]))
        self.x, self.out = _kept_memory(x_shape, shape)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution; its result is in the buffer until the next call. The last slab may be smaller than the
        first."""
        out = self.out[: x.shape[0]]
        if not x.is_contiguous(memory_format=memory_format("channels_last", x.dim() - 2)):
            x = self.x[: x.shape[0]].copy_(x)
        out.zero_()  # the operator accumulates
        torch.ops.mkldnn._convolution_pointwise_.binary(
            out, x, self.weight, bias, *self.settings, "add", 1.0, None, [], None
        )
        return out


_kept = threading.local()
_KEPT_BYTES = 32 << 20  # enough for a slab and its input; larger memory is freed after the call


def _kept_memory(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Channels-last fp32 tensors in memory that this thread keeps from call to call."""
    sizes = [math.prod(shape) for shape in shapes]
    memory = getattr(_kept, "memory", None)
    if memory is None or memory.numel() < sum(sizes):
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
            memory = torch.empty(sum(sizes), dtype=torch.float32)
        if memory.nbytes <= _KEPT_BYTES:
            _kept.memory = memory
    parts = memory[: sum(sizes)].split(sizes)
    return [part.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1) for part, shape in zip(parts, shapes)]
