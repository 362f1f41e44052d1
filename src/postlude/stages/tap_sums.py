"""What each tap of a convolution reads, added up: all that a sum over its result's positions needs of the input."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Convolution
from postlude.plan.problem import power_of_two
from postlude.stages.cuts import accumulator
from postlude.stages.trace import launch

MOST_TAPS = 7  # along the last axis, which are unrolled
_TILE = 2048  # elements: 80 registers; of 4096, 160
_WIDEST = 512  # positions of a row in a tile
_PROGRAMS = 1024  # at least, where there are rows enough
_BY_AXIS = [f"{name}{axis}" for name in ("STRIDE_", "DILATION_", "P") for axis in "DHW"]


def sums_by_tap(conv: Convolution, x: Tensor) -> Tensor:
    """The sums [N, C, taps] in float64 of a contiguous input."""
    grid, numbers, cut = _cut(conv, x)
    chunks = grid[1]
    shape = (*x.shape[:2], math.prod(conv.kernel))
    sums = torch.empty(shape if chunks == 1 else (chunks, *shape), dtype=torch.float64, device=x.device)
    last = {"BLOCK_KW": power_of_two(conv.kernel[-1])}
    launch("tap_sums", "tap_sums_kernel", grid, [x, sums], numbers, {**cut, **last})
    return sums if chunks == 1 else sums.sum(0)


def sums_gradient(conv: Convolution, dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of the input x from that of its sums by tap."""
    grid, numbers, cut = _cut(conv, x)
    dx, acc = torch.empty(x.shape, dtype=x.dtype, device=dy.device), accumulator(x.dtype)  # x itself is not kept
    launch("tap_sums", "tap_sums_gradient_kernel", grid, [dy.contiguous(), dx], numbers, {**cut, "ACC": acc})
    return dx


def _cut(conv: Convolution, x: Tensor) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """The grid, the numbers and the constants that both kernels take."""
    missing = 3 - conv.dims

    def in_space(sizes: tuple[int, ...], filler: int) -> tuple[int, ...]:
        return (filler,) * missing + sizes

    depth, height, width = in_space(tuple(x.shape[2:]), 1)
    kernel, out = in_space(conv.kernel, 1), in_space(conv.output_space(tuple(x.shape[2:])), 1)
    rows, channels = depth * height, x.shape[0] * x.shape[1]
    block_w = min(_WIDEST, power_of_two(width))
    block_h = min(_TILE // block_w, power_of_two(rows))
    tiles = -(-rows // block_h)
    each = -(-tiles // min(tiles, -(-_PROGRAMS // channels))) * block_h
    by_axis = (*in_space(conv.stride, 1), *in_space(conv.dilation, 1), *in_space(conv.padding, 0))
    constants = {
        "KH": kernel[1],
        "KW": kernel[2],
        "TAP_ROWS": kernel[0] * kernel[1],
        **dict(zip(_BY_AXIS, by_axis)),
        "IS_CONV_TRANSPOSED": conv.transposed,
        "BLOCK_H": block_h,
        "BLOCK_W": block_w,
        "BLOCK_TAPS": power_of_two(kernel[0] * kernel[1]),
    }
    return (channels, -(-rows // each)), (height, width, *out, rows, each), constants
