"""A tensor as a matrix of positions by channels, in half-precision planes where its precision asks for them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from postlude.plan.gemm import Arithmetic, Volume
from postlude.plan.problem import Layout, Spec, power_in, power_of_two
from postlude.plan.tiles import pass_warps, short_rows
from postlude.run.launch import Launch

# [rows, pitch, channels] twice (the same where there is one plane), and the channels' largest magnitudes where the
# planes are scaled; behind them whether there was an infinity, where that is to be kept
Packed = tuple[Tensor, Tensor, Tensor]
_PACK_BLOCK = 64  # positions of a packing tile
_MOST_BLOCKS = 65_535  # of a row: CUDA allows no more along the second axis of a grid
# Of a program that looks for the largest: elements of a tile, tiles of long rows or samples of short ones, warps.
_LARGEST, _LARGEST_TILES, _LARGEST_SAMPLES, _LARGEST_WARPS = 4096, 4, 8, 4


def weight_strides(weight: Tensor, transposed: bool) -> tuple[int, int, int]:
    """Of an output channel, an input channel and a tap: a transposed convolution's weight has the first two turned."""
    return weight.stride(int(transposed)), weight.stride(int(not transposed)), weight.stride(-1)


def weight_launch(
    volume: Volume,
    arithmetic: Arithmetic,
    channels: int,
    block_c: int,
    outputs: int,
    numbers: tuple[int, ...],
    flip: bool,
    unfolded: int = 1,
) -> Launch:
    """Takes the weight, what it is packed to, the input's largest magnitudes and what undoes the scales."""
    from postlude.kernels.triton.pack import pack_weight_kernel

    constants = {
        "ROWS": volume.kernel[0] * volume.kernel[1],
        "KW": volume.kernel[2],
        "WIDTH": volume.width,
        "SPAN": volume.span,
        "UNFOLDED": unfolded,
        "CP": channels,
        "BLOCK_O": block_c,
        "PLANES": arithmetic.planes,
        "SCALED": arithmetic.scaled,
        "KEEPS": arithmetic.keeps_infinities,
        "FLIP": flip,
        "BLOCK": 1024,
    }
    return Launch(pack_weight_kernel, (outputs, volume.width), numbers, constants)


class Packer:
    """Tensors of one shape and layout as a matrix: what every way of packing them has in common."""

    launch: Launch  # takes the tensor, both planes and the channels' largest magnitudes
    front = 0  # elements of zeros before the matrix

    def __init__(self, x: Spec, arithmetic: Arithmetic, shape: tuple[int, int, int], tail: int) -> None:
        """`tail`: the first row that no program of the launch writes."""
        self.arithmetic, self.dtype = arithmetic, getattr(torch, arithmetic.operands)
        self.shape, self.tail, self.channels = shape, tail, x.shape[1]
        self.largest = largest_launch(x, arithmetic) if arithmetic.scaled else None

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Packed:
        """`largest`: the channels' largest magnitudes, where somebody has found them already."""
        if largest is None and self.largest is not None:
            largest = self.none_found(x.device)
            self.largest(x, largest)
        high = self.empty(x.device)
        low = self.empty(x.device) if self.arithmetic.planes == 2 else high
        largest = high if largest is None else largest  # not x, which may be large and soon unneeded
        self.launch(x, self.matrix(high), self.matrix(low), largest)
        return high, low, largest

    def none_found(self, device: torch.device) -> Tensor:
        """The largest magnitudes before any number was looked at."""
        return torch.zeros(self.channels + self.arithmetic.keeps_infinities, dtype=torch.int32, device=device)

    def empty(self, device: torch.device) -> Tensor:
        """To be written; what no program of the packing kernel writes is zero."""
        shape = (self.front + math.prod(self.shape),) if self.front else self.shape
        made = torch.empty(shape, dtype=self.dtype, device=device)
        if self.front:
            made[: self.front].zero_()
        if self.tail < self.shape[0]:
            self.matrix(made)[self.tail :].zero_()
        return made

    def matrix(self, made: Tensor) -> Tensor:
        return made[self.front :].view(self.shape) if self.front else made


class InputPacking(Packer):
    """Positions as they lie, into one volume."""

    def __init__(self, x: Spec, volume: Volume, arithmetic: Arithmetic, channels: int) -> None:
        shape = (x.shape[0] * volume.sample_rows + volume.tail_rows, volume.pitch, channels)
        # By rows of the volume, or by samples where no border lies between the rows: tiles then end only with a sample.
        is_long = volume.is_flat and math.prod(volume.space) <= _MOST_BLOCKS * _PACK_BLOCK
        super().__init__(x, arithmetic, shape, x.shape[0] * volume.sample_rows if is_long else shape[0])
        read = volume.as_one_row() if is_long else volume
        self.rows = read.space[0] * read.space[1]  # of a sample, that hold something
        width = self.row = read.space[2]  # positions of a row that hold something
        block, block_c = min(_PACK_BLOCK, max(16, power_of_two(width))), min(64, channels & -channels)
        self.grid = (x.shape[0] if is_long else shape[0], -(-width // block), channels // block_c)
        self.numbers = (*x.shape[:2], *read.space, *read.padding, read.pitch, read.padded[1], read.sample_rows)
        self.tile = {"BLOCK": block, "BLOCK_C": block_c, "PAD": power_of_two(max(1, volume.padding[2]))}
        self.launch = self._prepared(x.layout)

    def _prepared(self, layout: Layout) -> Launch:
        from postlude.kernels.triton.pack import pack_input_kernel

        constants = {
            "CP": self.shape[2],
            "PLANES": self.arithmetic.planes,
            "SCALED": self.arithmetic.scaled,
            "KEEPS": self.arithmetic.keeps_infinities,
            "LAST": layout == "channels_last",
            **self.tile,
        }
        return Launch(pack_input_kernel, self.grid, self.numbers, constants)


def largest_launch(x: Spec, arithmetic: Arithmetic) -> Launch:
    """Each channel's largest finite magnitude."""
    from postlude.kernels.triton.pack import largest_kernel

    (batch, channels), positions, is_last = x.shape[:2], math.prod(x.shape[2:]), x.layout == "channels_last"
    short = 0 if is_last else short_rows(_LARGEST, channels, positions)
    if short:
        block, block_c, chunks = power_of_two(positions), short, 1
        tiles = next(count for count in range(_LARGEST_SAMPLES, 0, -1) if batch % count == 0)  # samples
    else:
        block_c = min(64, power_of_two(channels)) if is_last else 1
        block = _LARGEST // block_c
        tiles = min(_LARGEST_TILES, -(-positions // block))
        chunks = -(-positions // (block * tiles))
    grid = ((batch // tiles if short else batch * chunks) * -(-channels // block_c),)
    constants = {
        "LAST": is_last,
        "SHORT": bool(short),
        "ALIGN": 1 if is_last else power_in(positions, 16),
        "FLAGS": arithmetic.flags_infinities,
        "BLOCK": block,
        "BLOCK_C": block_c,
    }
    warps = pass_warps(block * block_c, _LARGEST_WARPS, 8)
    return Launch(largest_kernel, grid, (channels, positions, chunks, tiles), constants, warps)
