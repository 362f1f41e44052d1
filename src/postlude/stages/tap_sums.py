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

_MOST_TAPS = 7  # along z: a sum for each is in registers
_WIDEST = 512  # positions of a slice in a tile
_BY_WARP = 128  # positions: a warp reads 512 bytes, and no two threads share a position, so slices add up in registers
_DEPTH = 8  # slices of a tile: a thread has 32 elements in flight
_PROGRAMS = 4096  # at least, where there are slices enough: several for each place on the card
_LEAST_TILES = 8  # of a program, which ends with sums over its threads
_BY_AXIS = [f"{name}{axis}" for name in ("STRIDE_", "DILATION_", "P") for axis in "DHW"]


def serves(conv: Convolution, x: Tensor) -> bool:
    return x.is_contiguous() and conv.kernel[0] <= _MOST_TAPS


def sums_by_tap(conv: Convolution, x: Tensor) -> Tensor:
    """The sums [N, C, taps] in float64 of a contiguous input."""
    grid, numbers, cut, warps = _cut(conv, x)
    parts, shape = grid[1] * grid[2], (*x.shape[:2], math.prod(conv.kernel))
    sums = torch.empty(shape if parts == 1 else (parts, *shape), dtype=torch.float64, device=x.device)
    launch("tap_sums", "tap_sums_kernel", grid, [x, sums], numbers, cut, warps=warps)
    return sums if parts == 1 else sums.sum(0)


def sums_gradient(conv: Convolution, dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of the input x from that of its sums by tap."""
    grid, numbers, cut, warps = _cut(conv, x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=dy.device)  # x itself is not kept
    launch("tap_sums", "tap_sums_gradient_kernel", grid, [dy.contiguous(), dx], numbers, cut, warps=warps)
    return dx


def _cut(conv: Convolution, x: Tensor) -> tuple[tuple[int, int, int], tuple[int, ...], dict[str, Any], int]:
    """The grid, the numbers, the constants and the warps that both kernels take."""

    def in_space(sizes: tuple[int, ...], filler: int) -> tuple[int, ...]:
        """Of three axes: a 2-D input is a stack of rows, its slices."""
        return sizes if conv.dims == 3 else (sizes[0], filler, sizes[1])

    depth, height, width = in_space(tuple(x.shape[2:]), 1)
    kernel, out = in_space(conv.kernel, 1), in_space(conv.output_space(tuple(x.shape[2:])), 1)
    channels, positions = x.shape[0] * x.shape[1], height * width
    block_p = min(_WIDEST, power_of_two(positions))
    warps = max(1, block_p // _BY_WARP)
    block_d = min(_DEPTH * warps * _BY_WARP // block_p, power_of_two(depth))
    blocks, tiles = -(-positions // block_p), -(-depth // block_d)
    chunks = max(1, min(tiles // _LEAST_TILES, -(-_PROGRAMS // (channels * blocks))))
    slices = -(-tiles // chunks) * block_d
    by_axis = (*in_space(conv.stride, 1), *in_space(conv.dilation, 1), *in_space(conv.padding, 0))
    constants = {
        **dict(zip(("KD", "KH", "KW"), kernel)),
        **dict(zip(_BY_AXIS, by_axis)),
        "IS_CONV_TRANSPOSED": conv.transposed,
        "BLOCK_KD": power_of_two(kernel[0]),
        "BLOCK_D": block_d,
        "BLOCK_P": block_p,
        "ACC": accumulator(x.dtype),
    }
    numbers = (depth, height, width, *out, slices)
    return (channels, -(-depth // slices), blocks), numbers, constants, warps
