"""Packing the operands of a GEMM: an input as positions × channels, a weight as outputs × (taps, channels).

Both are split into half-precision planes where the precision asks for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from postlude.plan.gemm import Arithmetic
from postlude.plan.problem import Spec, power_in, power_of_two
from postlude.plan.tiles import pass_warps, short_rows
from postlude.plan.volume import Volume
from postlude.stages.trace import Matrix, Pointer, Unread, launch, or_unread

_PACK_BLOCK = 64  # positions of a packing tile
_MOST_BLOCKS = 65_535  # per row: CUDA's limit along the second axis of a grid
# For the program that finds largest magnitudes: elements of a tile, tiles of long rows or samples of short ones, warps.
_LARGEST, _LARGEST_TILES, _LARGEST_SAMPLES, _LARGEST_WARPS = 4096, 4, 8, 4


class Unpacked(NamedTuple):
    """What is packed for a GEMM."""

    tensor: Tensor
    largest: Tensor | None = None  # as in `Packed`, if known


class Packed(NamedTuple):
    high: Tensor  # [rows, pitch, channels]
    low: Tensor | None = None  # the second plane, where there are two
    # The largest magnitude of each channel if the planes are scaled, followed by a flag for an infinity if those are
    # kept.
    largest: Tensor | None = None


def weight_strides(weight: Tensor, transposed: bool) -> tuple[int, int, int]:
    """The strides of output channel, input channel and tap. A transposed convolution has the first two swapped."""
    return weight.stride(int(transposed)), weight.stride(int(not transposed)), weight.stride(-1)


def planes(arithmetic: Arithmetic) -> dict[str, int | bool]:
    """The constants that tell every packing or multiplying kernel about the arithmetic."""
    return {"PLANES": arithmetic.planes, "IS_SCALED": arithmetic.scaled, "KEEPS_INF": arithmetic.keeps_infinities}


def none_found(channels: int, arithmetic: Arithmetic, device: torch.device) -> Tensor:
    """Zeros, with which the search for the largest magnitudes starts."""
    return torch.zeros(channels + arithmetic.keeps_infinities, dtype=torch.int32, device=device)


def find_largest(x: Tensor, spec: Spec, arithmetic: Arithmetic) -> Tensor:
    """Each channel's largest finite magnitude."""
    (batch, channels), positions, is_last = spec.shape[:2], math.prod(spec.shape[2:]), spec.layout == "channels_last"
    short = 0 if is_last else short_rows(_LARGEST, channels, positions)
    if short:
        block, block_c, chunks = power_of_two(positions), short, 1
        tiles = next(count for count in range(_LARGEST_SAMPLES, 0, -1) if batch % count == 0)  # samples
    else:
        block_c = min(64, power_of_two(channels)) if is_last else 1
        block = _LARGEST // block_c
        tiles = min(_LARGEST_TILES, -(-positions // block))
        chunks = -(-positions // (block * tiles))
    found = none_found(channels, arithmetic, x.device)
    launch(
        "pack",
        "largest_kernel",
        ((batch // tiles if short else batch * chunks) * -(-channels // block_c),),
        [x, found],
        (channels, positions, chunks, tiles),
        {
            "IS_CHANNELS_LAST": is_last,
            "HAS_SHORT_ROWS": bool(short),
            "ALIGN": 1 if is_last else power_in(positions, 16),
            "FLAGS_INF": arithmetic.flags_infinities,
            "BLOCK_S": block,
            "BLOCK_C": block_c,
        },
        pass_warps(block * block_c, _LARGEST_WARPS, 8),
    )
    return found


class Packing:
    """How an input is written into one packed volume. `front` is the number of zeros before the matrix."""

    def __init__(self, x: Spec, volume: Volume, arithmetic: Arithmetic, channels: int, front: int = 0) -> None:
        self.spec, self.arithmetic, self.front = x, arithmetic, front
        self.shape = (x.shape[0] * volume.sample_rows + volume.tail_rows, volume.pitch, channels)
        # By rows of the volume; by whole samples if there is no border between rows, which leaves fewer partial tiles.
        is_long = volume.is_flat and math.prod(volume.space) <= _MOST_BLOCKS * _PACK_BLOCK
        # The first row that no program writes.
        self.tail = x.shape[0] * volume.sample_rows if is_long else self.shape[0]
        read = volume.as_one_row() if is_long else volume
        self.rows = read.space[0] * read.space[1]  # rows per sample that hold input
        width = self.row = read.space[2]  # positions of a row that hold input
        block, block_c = min(_PACK_BLOCK, max(16, power_of_two(width))), min(64, channels & -channels)
        self.grid = (x.shape[0] if is_long else self.shape[0], -(-width // block), channels // block_c)
        self.numbers = (*x.shape[:2], *read.space, *read.padding, read.pitch, read.padded[1], read.sample_rows)
        self.tile = {"BLOCK_W": block, "BLOCK_C": block_c, "BLOCK_PAD": power_of_two(max(1, volume.padding[2]))}

    def empty(self, device: torch.device) -> Tensor:
        """Memory for the packed volume. What no program of the packing kernel writes is set to zero."""
        shape = (self.front + math.prod(self.shape),) if self.front else self.shape
        made = torch.empty(shape, dtype=getattr(torch, self.arithmetic.operands), device=device)
        if self.front:
            made[: self.front].zero_()
        if self.tail < self.shape[0]:
            self.matrix(made)[self.tail :].zero_()
        return made

    def matrix(self, made: Tensor) -> Tensor:
        return made[self.front :].view(self.shape) if self.front else made

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Packed:
        """Packs `x`. `largest` is the largest magnitude of each channel, if known already."""
        if largest is None and self.arithmetic.scaled:
            largest = find_largest(x, self.spec, self.arithmetic)
        high = self.empty(x.device)
        low = self.empty(x.device) if self.arithmetic.planes == 2 else None
        second = None if low is None else self.matrix(low)
        launch(
            "pack",
            "pack_input_kernel",
            self.grid,
            [x, self.matrix(high), or_unread(second, high), or_unread(largest, high)],
            self.numbers,
            {
                "C_PACKED": self.shape[2],
                **planes(self.arithmetic),
                "IS_CHANNELS_LAST": self.spec.layout == "channels_last",
                **self.tile,
            },
        )
        return Packed(high, low, largest)


def matrices(packed: Packed, shape: tuple[int, int], row: int, block: tuple[int, int]) -> tuple[Matrix, Pointer]:
    """Both planes as the GEMM reads them; rows begin `row` elements apart."""
    high = Matrix(packed.high, shape, (row, 1), block)
    return high, Unread(high) if packed.low is None else high._replace(base=packed.low)


class PackedWeight(NamedTuple):
    matrix: Tensor  # [outputs · NEIGHBOURS, PLANES · K]
    unscale: Tensor | None  # [outputs], the inverse scales, if there are any


def packed_weight(outputs: int, width: int, depth: int, arithmetic: Arithmetic, x: Tensor) -> PackedWeight:
    """Memory for a packed weight."""
    dtype = getattr(torch, arithmetic.operands)
    packed = torch.empty((outputs * width, arithmetic.planes * depth), dtype=dtype, device=x.device)
    unscale = torch.empty(outputs, dtype=torch.float32, device=x.device) if arithmetic.scaled else None
    return PackedWeight(packed, unscale)


def pack_weight(
    weight: Tensor,
    volume: Volume,
    arithmetic: Arithmetic,
    channels: int,
    block_c: int,
    sizes: tuple[int, int],
    largest: Tensor | None,
    flip: bool,
    unfolded: int = 1,
) -> PackedWeight:
    """Packs a weight. This runs on every call, because a weight may change in ways that leave no trace.

    `sizes` are the output and input channels, `largest` the largest magnitudes of the input's channels.
    """
    outputs = -(-sizes[0] // block_c) * block_c
    rows = volume.kernel[0] * volume.kernel[1]
    made = packed_weight(outputs, volume.width, rows * volume.span * channels, arithmetic, weight)
    launch(
        "pack",
        "pack_weight_kernel",
        (outputs, volume.width),
        [weight, made.matrix, or_unread(largest, weight), or_unread(made.unscale, weight)],
        (*sizes, *weight_strides(weight, flip)),
        {
            "TAP_ROWS": rows,
            "KW": volume.kernel[2],
            "NEIGHBOURS": volume.width,
            "SPAN": volume.span,
            "UNFOLDED_TAPS": unfolded,
            "C_PACKED": channels,
            "BLOCK_C": block_c,
            **planes(arithmetic),
            "IS_FLIPPED": flip,
            "BLOCK_K": 1024,
        },
    )
    return made
