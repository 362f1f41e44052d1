"""Our convolution that reads rows of channels where they lie, as a value: when it serves, and its tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from postlude.cards import WGMMA_ROWS
from postlude.chain import Chain, Convolution
from postlude.hardware import Machine
from postlude.plan.gemm import SHARED_BESIDE, Arithmetic, Volume, padded_channels, volume_for
from postlude.plan.problem import Problem, power_of_two
from postlude.plan.program import norm_hides_infinities
from postlude.plan.tiles import answers, product_questions

_WASTE = 1.1  # positions computed for one that is wanted, at most
_BACK_ROWS = 128


@dataclass(frozen=True)
class Boxes:
    """One way of running it. A tile is `block_h` rows of `block_j` columns, each `width` neighbouring outputs."""

    arithmetic: Arithmetic
    volume: Volume  # the input's sizes, the taps and the padding; the input itself has no border
    channels: int  # of a position, padded where the input is brought into rows first
    packs: bool  # the input is contiguous, or of other channels or dtype: it is brought into rows first
    block_h: int
    block_j: int
    block_c: int
    block_k: int
    stages: int
    warps: int

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
    conv, space = chain.convolution, problem.x.shape[2:]
    if not _serves(conv, space, arithmetic, machine):
        return None
    if _width(conv) > 1 and not norm_hides_infinities(chain):
        return None  # products with zeros, which an infinity does not survive
    packs = problem.x.layout != "channels_last" or padded_channels(conv.in_channels) != conv.in_channels
    packs = packs or problem.x.dtype != arithmetic.operands  # as under autocast
    usual = machine.card.tiles.in_place_of(_width(conv) * _block_c(conv))
    return _in_the_best_tile("product in place", conv, space, arithmetic, machine, packs, usual)


def gradient_boxes_for(
    back: Convolution, space: tuple[int, ...], arithmetic: Arithmetic, machine: Machine
) -> Boxes | None:
    """For the input's gradient, `back` being the convolution that finds it. The weight's gradient reads the same packed
    values, in the input's volume: without a border there, as of a transposed convolution without padding, they are
    rows of channels as well."""
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
    """The first that fits: a tuned one may have been measured with fewer channels, or other sizes."""
    volume, channels = volume_for(conv, space, _width(conv)), padded_channels(conv.in_channels)
    tuned = (row.values for row in answers(machine, *product_questions(kind, conv, arithmetic, machine)))
    for tile in (*tuned, usual):
        box = _shape_of(tile["columns"], volume)
        sizes = (_block_c(conv), math.gcd(tile["steps"], channels), tile["stages"], tile.get("warps", usual["warps"]))
        boxes = Boxes(arithmetic, volume, channels, packs, *box, *sizes)
        fits = not machine.card.shared_bytes or boxes.shared_bytes <= machine.card.shared_bytes
        computed = math.prod(boxes.tiles) * boxes.block_h * boxes.block_j * boxes.width
        if fits and computed <= _WASTE * math.prod(volume.out):
            return boxes
    return None


def _block_c(conv: Convolution) -> int:
    """Output channels of a tile."""
    return min(128, max(16, power_of_two(conv.out_channels)))


def _width(conv: Convolution) -> int:
    return width_for(conv, _block_c(conv))


def width_for(conv: Convolution, block_c: int) -> int:
    """Neighbouring outputs of one row. 64 channels fill the instruction alone; where the sum is long, twice as many
    outputs read each weight half as often (64→64 at 64³: 0.238 ms, 0.261 with one; 32→64: 0.217 and 0.148)."""
    if conv.kernel[-1] == 1:
        return 1
    return 2 if block_c == 64 and conv.in_channels > 32 else max(1, WGMMA_ROWS // block_c)


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
