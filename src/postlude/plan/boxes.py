"""Our implicit GEMM that reads a channels-last input in place by TMA boxes: when it is used, and its tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from postlude.card_tiles import TileOrigin
from postlude.cards import WGMMA_ROWS
from postlude.chain import Chain, Convolution
from postlude.hardware import Machine
from postlude.plan.barriers import norm_hides_infinities
from postlude.plan.gemm import SHARED_BESIDE, Arithmetic, padded_channels
from postlude.plan.problem import Problem, power_of_two
from postlude.plan.tiles import product_uses, rows_for
from postlude.plan.volume import Volume, volume_for

_WASTE = 1.1  # most positions computed per position needed
_BACK_ROWS = 128


@dataclass(frozen=True)
class Boxes:
    """One way to run it. A tile is `block_h` rows of `block_j` columns, and a column is `width` neighbouring
    outputs."""

    arithmetic: Arithmetic
    volume: Volume  # the input's sizes, the taps and the padding; the input itself is not padded
    channels: int  # per position; padded if the input is copied to channels-last first
    packs: bool  # the input is contiguous, or its channels or dtype do not fit: it is copied to channels-last first
    block_h: int
    block_j: int
    block_c: int
    block_k: int
    stages: int
    warps: int
    origin: TileOrigin | None = field(default=None, compare=False)  # of its tile

    @property
    def width(self) -> int:
        return self.volume.width

    @property
    def rows(self) -> Volume:
        """The input as rows of channels, without padding."""
        return Volume(self.volume.space, (1, 1, 1), (0, 0, 0), 1)

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Tiles per sample along each axis."""
        depth, height, width = self.volume.out
        return depth, -(-height // self.block_h), -(-width // (self.block_j * self.width))

    @property
    def shared_bytes(self) -> int:
        """Upper bound of a block's shared memory: both operands of every pipeline stage, and the rest."""
        tiles = self.width * self.block_c + self.block_h * self.block_j
        return 2 * tiles * self.block_k * self.stages + SHARED_BESIDE

    def __str__(self) -> str:
        positions = self.block_h * self.block_j
        size = f"{self.width * self.block_c} × {positions} × {self.block_k}"
        return f"matrix product of {self.arithmetic}, read in place; tiles of {size}"


def boxes_for(chain: Chain, problem: Problem, arithmetic: Arithmetic, machine: Machine) -> Boxes | None:
    """The tiles, or None if the GEMM over a packed input is better. `unsupported` must be None for the convolution."""
    conv, space = chain.convolution, problem.x.shape[2:]
    if not _serves(conv, space, arithmetic, machine):
        return None
    if _width(conv) > 1 and not norm_hides_infinities(chain):
        return None  # several neighbours multiply by zeros, which turns an infinity into NaN
    packs = problem.x.layout != "channels_last" or padded_channels(conv.in_channels) != conv.in_channels
    packs = packs or problem.x.dtype != arithmetic.operands  # as under autocast
    usual = machine.card.tiles.in_place_of(_width(conv) * _block_c(conv))
    return _in_the_best_tile("product in place", conv, space, arithmetic, machine, packs, usual)


def gradient_boxes_for(
    back: Convolution, space: tuple[int, ...], arithmetic: Arithmetic, machine: Machine
) -> Boxes | None:
    """The tiles for the input's gradient, which the convolution `back` computes.

    The weight's gradient reads the same packed values, in the input's volume. Only without padding there, as for a
    transposed convolution without padding, are these plain rows of channels.
    """
    is_flat = not any(volume_for(back, space, 1).padding) and max(back.kernel) > 1
    if not is_flat or not _serves(back, space, arithmetic, machine) or _width(back) * _block_c(back) != _BACK_ROWS:
        return None
    usual = dict(machine.card.tiles.in_place_back)
    return _in_the_best_tile("input's gradient in place", back, space, arithmetic, machine, True, usual)


def _serves(conv: Convolution, space: tuple[int, ...], arithmetic: Arithmetic, machine: Machine) -> bool:
    if not machine.card.abilities.reads_boxes_in_place or arithmetic.scaled or arithmetic.is_exact:
        return False
    if max(conv.in_channels, conv.out_channels) > machine.card.crossovers.in_place_channels:
        return False
    return _width(conv) * _block_c(conv) >= WGMMA_ROWS and space[-1] % _width(conv) == 0


def _in_the_best_tile(
    kind: str,
    conv: Convolution,
    space: tuple[int, ...],
    arithmetic: Arithmetic,
    machine: Machine,
    packs: bool,
    usual: dict[str, int],
) -> Boxes | None:
    """The first tile that fits. A tuned one may have been measured with fewer channels or other sizes."""
    volume, channels = volume_for(conv, space, _width(conv)), padded_channels(conv.in_channels)
    uses = product_uses(kind, conv, arithmetic, machine)
    for row in (*rows_for(machine, *uses), None):
        tile = usual if row is None else row.values
        box = _shape_of(tile["columns"], volume)
        sizes = (_block_c(conv), math.gcd(tile["steps"], channels), tile["stages"], tile.get("warps", usual["warps"]))
        boxes = Boxes(arithmetic, volume, channels, packs, *box, *sizes, TileOrigin(uses[0], row))
        computed = math.prod(boxes.tiles) * boxes.block_h * boxes.block_j * boxes.width
        if machine.card.holds(boxes.shared_bytes) and computed <= _WASTE * math.prod(volume.out):
            return boxes
    return None


def _block_c(conv: Convolution) -> int:
    """Output channels of a tile."""
    return min(128, max(16, power_of_two(conv.out_channels)))


def _width(conv: Convolution) -> int:
    """Neighbouring outputs per row of the GEMM.

    64 channels alone fill a tensor-core instruction. With a deep sum two outputs still pay, because each weight is read
    half as often: 64→64 at 64³ takes 0.238 ms with two and 0.261 with one, but 32→64 takes 0.217 and 0.148.
    """
    block_c = _block_c(conv)
    if conv.kernel[-1] == 1:
        return 1
    return 2 if block_c == 64 and conv.in_channels > 32 else max(1, WGMMA_ROWS // block_c)


def _shape_of(columns: int, volume: Volume) -> tuple[int, int]:
    """The box that wastes the fewest positions; among equals the squarest, whose halo is smallest."""
    _, height, width = volume.out
    across = -(-width // volume.width)

    def cost(block_j: int) -> tuple[int, int, int]:
        block_h = columns // block_j
        computed = -(-height // block_h) * block_h * -(-across // block_j) * block_j
        return computed, block_h + block_j, -block_j

    block_j = min((1 << power for power in range(3, columns.bit_length() - 1)), key=cost)
    return columns // block_j, block_j
