"""The tiles of every pass on a GPU: the user's tuned ones first, then those shipped for the card."""

from __future__ import annotations

from collections.abc import Iterator

from postlude.chain import Convolution
from postlude.hardware import Machine
from postlude.plan.gemm import Arithmetic
from postlude.plan.problem import power_of_two
from postlude.tile_table import Row, TileUse

_MOST_BLOCKS = 65_535  # CUDA allows no more along the second axis of a grid


def rows_for(machine: Machine, *uses: TileUse) -> Iterator[Row]:
    """The rows for each use, best first: for each the user's own, then the shipped one."""
    for use in uses:
        for table in (machine.tiles, machine.card.tiles.table):
            row = table.find(use)
            if row is not None:
                yield row


def row_for(machine: Machine, use: TileUse) -> Row:
    return next(rows_for(machine, use))


def product_uses(kind: str, conv: Convolution, arithmetic: Arithmetic, machine: Machine) -> tuple[TileUse, ...]:
    """The uses under which a GEMM's tiles are looked up. By residue, and for the input's gradient, those of a forward
    GEMM of stride 1 are the last resort."""
    asked = _convolution(kind, conv, f"{arithmetic.planes} plane{'s' * (arithmetic.planes != 1)}", machine)
    if kind not in ("product by residue", "input's gradient", "input's gradient by residue"):
        return (asked,)
    return asked, TileUse("product", *_fields(asked))


def few_channels_use(kind: str, conv: Convolution, planes: int, machine: Machine) -> TileUse:
    return _convolution(kind, conv, f"{planes} plane{'s' * (planes != 1)}", machine)


def pass_use(kind: str, dtype: str, channels: int, layout: str, machine: Machine) -> TileUse:
    return TileUse(kind, machine.card.architecture, dtype, (0, power_of_two(channels)), layout)


def short_rows(elements: int, channels: int, positions: int) -> int:
    """Whole rows of one sample that fit in a tile; 0 if a row is longer than a tile."""
    row = power_of_two(positions)
    return 0 if row > elements or channels > _MOST_BLOCKS else min(elements // row, power_of_two(channels))


def pass_warps(elements: int, most: int, each: int) -> int:
    """Warps for a tile: fewer than `most` if a thread would have less than `each` elements."""
    return min(most, max(1, elements // (32 * each)))


def _convolution(kind: str, conv: Convolution, arithmetic: str, machine: Machine) -> TileUse:
    ways = (power_of_two(conv.in_channels), power_of_two(conv.out_channels))
    return TileUse(kind, machine.card.architecture, arithmetic, ways)


def _fields(use: TileUse) -> tuple[str, str, tuple[int, int], str]:
    return use.architecture, use.arithmetic, use.channels, use.layout
