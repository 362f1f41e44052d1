"""The tiles that are shipped, one table for each kind of card: measured ones for Hopper, rules for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from postlude.tile_table import Question, Row, TileTable

MEASURED = "shipped for sm_90, measured on an H200"
BY_RULE_80 = "shipped for sm_80, by rule and not measured"
RULE = "by rule, not measured on this kind of card"
# Of passes whose tiles depend on more than a `Question` says; only Hopper has them.
IN_CODE = {
    "product in place": MEASURED,  # `Tiles.in_place`
    "input's gradient in place": MEASURED,  # `Tiles.in_place_back`
    "weight's gradient": "by rule, after measurements on an H200",  # `weight_gemm_for`
}
Settings = tuple[tuple[str, int], ...]


class WeightTile(NamedTuple):
    """How the weight's gradient is cut, besides its rows and columns."""

    turned: bool  # the longer side is the other operand's
    block_k: int
    stages: int
    warps: int
    programs: int  # for each multiprocessor


@dataclass(frozen=True)
class Tiles:
    """All that is shipped for one kind of card."""

    table: TileTable
    in_place: tuple[tuple[int, Settings], ...] = ()  # by the rows of a tile
    in_place_back: Settings = ()
    weight: tuple[tuple[tuple[int, int, int], WeightTile], ...] = ()  # by planes, rows and columns

    def in_place_of(self, rows: int) -> dict[str, int]:
        return dict(dict(self.in_place)[rows])

    def weight_of(self, planes: int, rows: int, columns: int) -> WeightTile | None:
        return dict(self.weight).get((planes, rows, columns))


def _row(origin: str, question: Question, **settings: int) -> Row:
    return Row(question, tuple(settings.items()), origin)


def _settings(**settings: int) -> Settings:
    return tuple(settings.items())


def _product(origin: str, planes: str, **settings: int) -> Row:
    return _row(origin, Question("product", arithmetic=planes), **settings)


def _phases(origin: str, planes: str, **settings: int) -> Row:
    return _row(origin, Question("product by phase", arithmetic=planes), **settings)


def _unfolded() -> Iterator[Row]:
    """Of few input channels: two planes of so short a product leave room for more than one block of four warps."""
    for inputs in (1, 2, 4, 8):
        for planes, outputs in (("1 plane", (16, 32, 64)), ("2 planes", (16, 32))):
            for count in outputs:
                question = Question("product", arithmetic=planes, channels=(inputs, count))
                yield _row(MEASURED, question, rows=256, stages=3, warps=4)
            question = Question("product", arithmetic=planes, channels=(inputs, 0))
            yield _row(MEASURED, question, rows=128, stages=3, warps=4)


def _phases_into_few() -> Iterator[Row]:
    for planes in ("1 plane", "2 planes"):
        question = Question("product by phase", arithmetic=planes, channels=(0, 16))
        yield _row(MEASURED, question, rows=128, stages=3, warps=4)


def _back(planes: str, outputs: int, **settings: int) -> Row:
    return _row(MEASURED, Question("input's gradient", arithmetic=planes, channels=(0, outputs)), **settings)


def _passes(origin: str, layout: str, summed: int, programs: int, last: int) -> tuple[Row, ...]:
    moments, rest = (Question(kind, layout=layout) for kind in ("moments pass", "last pass"))
    return _row(origin, moments, elements=summed, programs=programs), _row(origin, rest, elements=last)


# Products: rows of a tile, stages of its pipeline, warps. On an H200 on chain 61 (docs/gpu.md): with one plane, 96 KiB,
# two blocks an SM hide each other's epilogue; with two planes, 192 KiB, there is room for one block.
#
# Products by phase, in 4 warps and short tiles, of which several hide each other's short loops: conv_transpose2d(64→64,
# k3, s2) → mish … at 128×64×128² in TF32 1.48 ms (128 rows and 8 warps 2.17), in fp32 1.87 (2.49).
#
# Few input channels, whose product is as short: conv2d(8→32) → … → group_norm at 128×8×256² in fp32 2.38 ms with 256
# rows and 4 warps, 2.97 with 128 and 8; conv2d(8→64) → group_norm in TF32 0.80 instead of 0.86.
#
# The input's gradient, where 64 channels come out: 0.48 instead of 0.51 ms on chain 61 in one plane, 1.51 instead of
# 1.66 in two; where 32 do, 0.163 instead of 0.181 (64→32 at 2×64³). It has no epilogue to hide. Its width are
# neighbouring outputs.
#
# Passes over a value: elements of a tile, and programs of the moments pass for each multiprocessor. On an H200 in fp16:
# the last pass over (2, 32, 128³) contiguous 0.128 ms with 2048, 0.134 with 8192 (in fp32, where a thread then has four
# loads under way, (128, 128, 126²) 0.62 ms with 2048 and 0.52 with 1024); the moments pass 0.064 with 1024 and
# 16 tiles a program, 0.069 with 4096 and one. Channels-last 0.137 and 0.091 (2048 in the moments pass: 0.089, but 0.012
# instead of 0.008 over (2, 128, 32³)).
#
# Few channels: the largest tile that is tried, and blocks of a multiprocessor. On an H200 on chain 23: tiles of 11 × 10
# rows 0.189 ms in two planes, 6 × 10 0.232, 8 × 8 0.216; two blocks an SM walking over the tiles. Their gradients:
# both 0.61 ms in two planes and 0.38 in one, 0.94 and 0.57 in tiles of 8 rows.
_HOPPER_ROWS = (
    *_unfolded(),
    _product(MEASURED, "1 plane", rows=128, stages=3, warps=4),
    _product(MEASURED, "2 planes", rows=128, stages=3, warps=8),
    *_phases_into_few(),
    _phases(MEASURED, "1 plane", rows=64, stages=3, warps=4),
    _phases(MEASURED, "2 planes", rows=64, stages=2, warps=4),
    _back("1 plane", 32, rows=256, width=4, stages=4, warps=8),
    _back("1 plane", 64, rows=256, width=2, stages=4, warps=8),
    _back("2 planes", 64, rows=128, width=1, stages=2, warps=4),
    _row(MEASURED, Question("last pass", arithmetic="float32", layout="contiguous"), elements=1024),
    *_passes(MEASURED, "contiguous", 1024, 8, 2048),
    *_passes(MEASURED, "channels_last", 8192, 2, 8192),
    _row(MEASURED, Question("few channels"), depth=11, height=10, blocks=2),
    _row(MEASURED, Question("few channels' gradients"), height=16),
)

HOPPER = Tiles(
    TileTable(_HOPPER_ROWS),
    # Columns, steps of the sum, stages and warps: the best of 128 settings in fp16 over the five shapes of docs/gpu.md.
    in_place=(
        (64, _settings(columns=256, steps=32, stages=4, warps=4)),
        (128, _settings(columns=128, steps=64, stages=3, warps=4)),
    ),
    # The input's gradient, which has no epilogue to hide: 0.434 ms on chain 61 in bf16, 0.457 in the tile above, 0.465
    # by the best packed product, whose rows of 34 are computed whole.
    in_place_back=_settings(columns=256, steps=64, stages=3, warps=8),
    # Chain 61 in one plane 0.346 ms (0.412 by `weight_gemm_for`'s rule; in two 1.54 and 1.71), 32→32 at 2×128³ 0.665
    # (0.703).
    weight=(
        ((1, 128, 64), WeightTile(True, 64, 4, 4, 1)),
        ((2, 128, 64), WeightTile(True, 32, 2, 4, 2)),
        ((1, 64, 128), WeightTile(False, 32, 5, 4, 1)),
    ),
)


def _by_rule(origin: str) -> Tiles:
    """Of products the largest tiles that do not spill: before Hopper their operands wait in registers."""
    return Tiles(
        TileTable(
            (
                _product(origin, "1 plane", rows=128, stages=3, warps=8),
                _product(origin, "2 planes", rows=64, stages=2, warps=8),
                _phases(origin, "1 plane", rows=128, stages=3, warps=8),
                _phases(origin, "2 planes", rows=64, stages=2, warps=8),
                *_passes(origin, "contiguous", 1024, 8, 2048),
                *_passes(origin, "channels_last", 8192, 2, 8192),
                _row(origin, Question("few channels"), depth=11, height=10, blocks=2),
            )
        )
    )


AMPERE, OTHERS = _by_rule(BY_RULE_80), _by_rule(RULE)
