"""An average pool folded into its convolution (plan/folding.py), by PyTorch's operators: the weight is small, and what
is left of the convolution is PyTorch's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude import reference
from postlude.chain import Convolution
from postlude.plan.folding import Folding
from postlude.stages.runs import along, runs_along

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d}


def average_through(conv: Convolution, folding: Folding, x: Tensor, weight: Tensor) -> Tensor:
    """What the pool gives of a convolution without its bias."""
    if folding.summed is not None:
        return _summed(conv, folding, folding.summed, x, weight)
    found = reference.convolve(folding.convolution, x, _folded_weight(conv, folding, weight), None)
    for axis, size in enumerate(folding.space, 2):
        found = found.narrow(axis, 0, size)
    return found


def _summed(conv: Convolution, folding: Folding, axis: int, x: Tensor, weight: Tensor) -> Tensor:
    left, out = folding.convolution, conv.output_size(axis, x.shape[2 + axis])
    sums = torch.stack(along(x, 2 + axis, runs_along(conv, axis, x.shape[2 + axis], out)), 2).flatten(1, 2)
    # A tap of this axis is an input channel now.
    taps = weight.movedim(2 + axis, 1 if conv.transposed else 2)
    taps = taps.flatten(0, 1) if conv.transposed else taps.flatten(1, 2)
    if left.transposed:
        sizes = (left.stride, left.padding, left.output_padding)
        found = _TRANSPOSED[left.dims](sums, taps / out, None, *sizes)
    else:
        found = _CONVOLVE[left.dims](sums, taps / out, None, left.stride, left.padding)
    return found.unsqueeze(2 + axis)


def _folded_weight(conv: Convolution, folding: Folding, weight: Tensor) -> Tensor:
    """[C_OUT, C_IN, taps]: each tap of a window, at every position of it, averaged."""
    if conv.transposed:  # its taps run backwards
        weight = weight.transpose(0, 1).flip(list(range(2, weight.dim())))
    strides = (1,) * conv.dims if conv.transposed else conv.stride
    shape, window = weight.shape, folding.window
    ones = weight.new_full((1, 1, *window), 1.0 / math.prod(window))
    reach = [(size - 1) * stride for size, stride in zip(window, strides)]
    each = _CONVOLVE[conv.dims](weight.reshape(-1, 1, *shape[2:]), ones, None, 1, reach, strides)
    spread = each.reshape(*shape[:2], *each.shape[2:])
    for axis, (first, step) in enumerate(zip(folding.first, folding.step), 2):
        spread = torch.ops.aten.slice.Tensor(spread, axis, first, spread.shape[axis], step)
    return spread
