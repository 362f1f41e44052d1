"""The mean over space of a convolution's result, from sums over its input alone.

A convolution is linear, so its mean is the weight applied to the mean of what each tap reads. That costs a pass
over the input instead of one over the output, and is exact enough (float64 after the first axis) to centre by.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from postlude.chain import Convolution


def convolution_mean(conv: Convolution, x: Tensor, weight: Tensor) -> Tensor:
    """[N, C_out] in float64, the bias left out."""
    batch, channels, *space = x.shape
    first, rest = _taps(conv, tuple(space))
    # [K0, S0] @ [N·C, S0, S1·S2], then float64 for the remaining axes: the sums grow long there.
    sums = torch.matmul(first.to(x.dtype), x.reshape(batch * channels, space[0], -1)).double() @ rest
    sums = sums.view(batch, conv.groups, channels // conv.groups, -1)  # [N, G, C_in/G, taps]
    weight = weight.double().flatten(2)
    if conv.transposed:
        grouped = weight.view(conv.groups, channels // conv.groups, -1, weight.shape[-1])  # [G, C_in/G, C_out/G, taps]
        total = torch.einsum("ngit,giot->ngo", sums, grouped)
    else:
        grouped = weight.view(conv.groups, -1, channels // conv.groups, weight.shape[-1])  # [G, C_out/G, C_in/G, taps]
        total = torch.einsum("ngit,goit->ngo", sums, grouped)
    return total.reshape(batch, -1) / math.prod(conv.output_space(tuple(space)))


@functools.lru_cache(maxsize=64)
def _taps(conv: Convolution, space: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    axes = [_axis_taps(conv, axis, size).double() for axis, size in enumerate(space)]
    rest = functools.reduce(torch.kron, axes[1:])
    return axes[0].T.contiguous().float(), rest  # [K0, S0], [S1·S2, K1·K2]


def _axis_taps(conv: Convolution, axis: int, size: int) -> Tensor:
    """[size, kernel]: does tap k read input i for some output position?"""
    here = torch.arange(size)[:, None]
    tap = torch.arange(conv.kernel[axis])[None, :] * conv.dilation[axis]
    out = conv.output_size(axis, size)
    if conv.transposed:
        place = here * conv.stride[axis] - conv.padding[axis] + tap
        return (place >= 0) & (place < out)
    place = here + conv.padding[axis] - tap  # output position times the stride
    return (place >= 0) & (place % conv.stride[axis] == 0) & (place // conv.stride[axis] < out)
