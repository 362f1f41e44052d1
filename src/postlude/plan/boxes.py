"""Our convolution that reads rows of channels where they lie, as a value: when it serves, and its tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from postlude.chain import Chain, Convolution
from postlude.hardware import Machine
from postlude.plan.gemm import SHARED_BESIDE, Arithmetic, Volume, padded_channels, volume_for
from postlude.plan.problem import Problem, power_of_two
from postlude.plan.program import norm_hides_infinities
from postlude.plan.tiles import answers, product_questions

_LEAST_ROWS = 64  # of Hopper's instruction: channels, times neighbouring outputs
_WASTE = 1.1  # positions computed for one that is wanted, at most
# Channels of a tile's rows → its columns, steps of the sum, stages. Measured on an H200 in fp16 over the five shapes of
# docs/gpu.md: the best of 128 settings.
_TILES = {64: (256, 32, 4), 128: (128, 64, 3)}
_MOST_CHANNELS = 128  # of input and output; above, cuDNN was measured to be faster (485 to 674 TFLOP/s)


@dataclass(frozen=True)
class Boxes:
    """One way of running it. A tile is `block_h` rows of `block_j` columns, each `width` neighbouring outputs."""

    arithmetic: Arithmetic
    volume: Volume  # the input's sizes, the taps and the padding; the input itself has no border
    channels: int  # of a position, padded where the input is brought into rows first
    packs: bool  # the input is contiguous, or has other channels: it is brought into rows first
    block_h: int
    block_j: int
    block_c: int
    block_k: int
    stages: int
    warps: int = 4

    @property
    def width(self) -> int:
        return self.volume.width

    @property
    def rows(self) -> Volume:
        """The input as rows of channels, without a border."""
        return Volume(self.volume.space, (1, 1, 1), (0, 0, 0), 1)

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Of a sample, along each axis."""
        depth, height, width = self.volume.out
        return depth, -(-height // self.block_h), -(-width // (self.block_j * self.width))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block at most: both operands of every stage, and the rest."""
        tiles = self.width * self.block_c + self.block_h * self.block_j
        return 2 * tiles * self.block_k * self.stages + SHARED_BESIDE

    def __str__(self) -> str:
        positions = self.block_h * self.block_j
        size = f"{self.width * self.block_c} × {positions} × {self.block_k}"
        return f"matrix product of {self.arithmetic}, read in place; tiles of {size}"


def boxes_for(chain: Chain, problem: Problem, arithmetic: Arithmetic, machine: Machine) -> Boxes | None:
    """None where the packed product serves better. The convolution must be one that nothing of `unsupported` hits."""
    conv = chain.producer
    assert conv is not None
    if machine.architecture != "sm_90" or arithmetic.scaled or arithmetic.operands == "float64":
        return None
    if max(conv.in_channels, conv.out_channels) > _MOST_CHANNELS:
        return None
    block_c = min(128, max(16, power_of_two(conv.out_channels)))
    width = width_for(conv, block_c)
    space = problem.x.shape[2:]
    if width * block_c < _LEAST_ROWS or space[-1] % width:
        return None
    if width > 1 and not norm_hides_infinities(chain):
        return None  # products with zeros, which an infinity does not survive
    volume = volume_for(conv, space, width)
    channels = padded_channels(conv.in_channels)
    packs = problem.x.layout != "channels_last" or channels != conv.in_channels
    tuned = (row.values for row in answers(machine, *product_questions("product in place", conv, arithmetic, machine)))
    for columns, steps, stages in (*(tuple(tile.values()) for tile in tuned), _TILES[width * block_c]):
        box = _shape_of(columns, volume)
        boxes = Boxes(arithmetic, volume, channels, packs, *box, block_c, math.gcd(steps, channels), stages)
        fits = not machine.shared_bytes or boxes.shared_bytes <= machine.shared_bytes
        computed = math.prod(boxes.tiles) * boxes.block_h * boxes.block_j * width
        if fits and computed <= _WASTE * math.prod(volume.out):
            return boxes  # else it was tuned for fewer channels, or other sizes: the shipped one
    return None


def width_for(conv: Convolution, block_c: int) -> int:
    """Neighbouring outputs of one row. 64 channels fill the instruction alone; where the sum is long, twice as many
    outputs read each weight half as often (64→64 at 64³: 0.238 ms, 0.261 with one; 32→64: 0.217 and 0.148)."""
    if conv.kernel[-1] == 1:
        return 1
    return 2 if block_c == 64 and conv.in_channels > 32 else max(1, _LEAST_ROWS // block_c)


def _shape_of(columns: int, volume: Volume) -> tuple[int, int]:
    """The box that computes the fewest positions for nothing; of equal ones the squarest, whose border is smallest."""
    _, height, width = volume.out
    across = -(-width // volume.width)

    def cost(block_j: int) -> tuple[int, int, int]:
        block_h = columns // block_j
        computed = -(-height // block_h) * block_h * -(-across // block_j) * block_j
        return computed, block_h + block_j, -block_j

    block_j = min((1 << power for power in range(3, columns.bit_length() - 1)), key=cost)
    return columns // block_j, block_j
