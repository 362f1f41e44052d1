"""The tiles that ship with Postlude, one table for each kind of card: measured for Hopper, by rule for the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from postlude.tile_table import Row, TileTable, TileUse

MEASURED = "shipped for sm_90, measured on an H200"
BY_RULE_90 = "shipped for sm_90, by rule and not measured"
BY_RULE_80 = "shipped for sm_80, by rule and not measured"
RULE = "by rule, not measured on this kind of card"
# The origin of tiles that depend on more than a `TileUse` holds; only Hopper has them.
IN_CODE = {
    "product in place": MEASURED,  # `Tiles.in_place`
    "input's gradient in place": MEASURED,  # `Tiles.in_place_back`
    "weight's gradient": "by rule, after measurements on an H200",  # `weight_gemm_for`
}
TileSettings = tuple[tuple[str, int], ...]


class TileOrigin(NamedTuple):
    """Where a tile comes from."""

    use: TileUse
    row: Row | None  # None: it is in the code

    def __str__(self) -> str:
        return f"{self.use}: {self.row or IN_CODE[self.use.kind]}"


class WeightTile(NamedTuple):
    """The tile of the weight gradient's GEMM, besides its rows and columns."""

    turned: bool  # A and B are swapped, because tensor cores are faster with the longer side as columns
    block_k: int
    stages: int
    warps: int
    programs: int  # per multiprocessor


@dataclass(frozen=True)
class Tiles:
    """All tiles that ship for one kind of card."""

    table: TileTable
    in_place: tuple[tuple[int, TileSettings], ...] = ()  # by the rows of a tile
    in_place_back: TileSettings = ()
    weight: tuple[tuple[tuple[int, int, int], WeightTile], ...] = ()  # by planes, rows and columns

    def in_place_of(self, rows: int) -> dict[str, int]:
        return dict(dict(self.in_place)[rows])

    def weight_of(self, planes: int, rows: int, columns: int) -> WeightTile | None:
        return dict(self.weight).get((planes, rows, columns))


def _row(origin: str, use: TileUse, **settings: int) -> Row:
    return Row(use, tuple(settings.items()), origin)


def _settings(**settings: int) -> TileSettings:
    return tuple(settings.items())


def _product(origin: str, planes: str, **settings: int) -> Row:
    return _row(origin, TileUse("product", arithmetic=planes), **settings)


def _phases(origin: str, planes: str, **settings: int) -> Row:
    return _row(origin, TileUse("product by phase", arithmetic=planes), **settings)


def _unfolded() -> Iterator[Row]:
    """Rows for few input channels. The GEMM is so short that several blocks of four warps fit even with two planes."""
    for inputs in (1, 2, 4, 8):
        for planes, outputs in (("1 plane", (16, 32, 64)), ("2 planes", (16, 32))):
            for count in outputs:
                use = TileUse("product", arithmetic=planes, channels=(inputs, count))
                yield _row(MEASURED, use, rows=256, stages=3, warps=4)
            use = TileUse("product", arithmetic=planes, channels=(inputs, 0))
            yield _row(MEASURED, use, rows=128, stages=3, warps=4)


def _phases_into_few() -> Iterator[Row]:
    for planes in ("1 plane", "2 planes"):
        use = TileUse("product by phase", arithmetic=planes, channels=(0, 16))
        yield _row(MEASURED, use, rows=128, stages=3, warps=4)


def _back(planes: str, outputs: int, **settings: int) -> Row:
    return _row(MEASURED, TileUse("input's gradient", arithmetic=planes, channels=(0, outputs)), **settings)


def _by_residue() -> Iterator[Row]:
    """As for the input's gradient at stride 1: four warps a block, so that several blocks fit. More output channels
    take a product's tiles."""
    for kind in ("product by residue", "input's gradient by residue"):
        for outputs in (1, 2, 4, 8, 16, 32, 64):
            use = TileUse(kind, arithmetic="2 planes", channels=(0, outputs))
            yield _row(BY_RULE_90, use, rows=128, stages=2, warps=4)


def _passes(origin: str, layout: str, summed: int, programs: int, last: int) -> tuple[Row, ...]:
    moments, rest = (TileUse(kind, layout=layout) for kind in ("moments pass", "last pass"))
    return _row(origin, moments, elements=summed, programs=programs), _row(origin, rest, elements=last)


# All times are from an H200.
#
# GEMMs: rows of a tile, pipeline stages, warps. Chain 61 (docs/gpu.md): with one plane a block takes 96 KiB of shared
# memory, and two blocks per SM hide each other's epilogue; with two planes it takes 192 KiB, and one block fits.
#
# GEMMs by phase: 4 warps and short tiles, so that several blocks hide each other's short loops.
# conv_transpose2d(64→64, k3, s2) → mish … at 128×64×128² takes 1.48 ms in TF32 (2.17 with 128 rows and 8 warps) and
# 1.87 in fp32 (2.49).
#
# Few input channels, whose GEMM is equally short: conv2d(8→32) → … → group_norm at 128×8×256² in fp32 takes 2.38 ms
# with 256 rows and 4 warps, 2.97 with 128 and 8; conv2d(8→64) → group_norm in TF32 takes 0.80 instead of 0.86.
#
# The input's gradient has no epilogue to hide. With 64 output channels: 0.48 instead of 0.51 ms on chain 61 in one
# plane, 1.51 instead of 1.66 in two; with 32: 0.163 instead of 0.181 (64→32 at 2×64³). `width` is its neighbouring
# outputs.
#
# Passes over a value: elements of a tile, and programs of the moments pass per multiprocessor. In fp16, contiguous,
# (2, 32, 128³): the last pass takes 0.128 ms with 2048 and 0.134 with 8192; the moments pass 0.064 with 1024 and 16
# tiles per program, 0.069 with 4096 and one. In fp32 a thread has four loads in flight with 1024: (128, 128, 126²)
# takes 0.52 ms with 1024 and 0.62 with 2048. Channels-last: 0.137 and 0.091 (with 2048 in the moments pass 0.089, but
# 0.012 instead of 0.008 over (2, 128, 32³)).
#
# Few channels: the largest tile that is tried, and blocks per multiprocessor. Chain 23 in two planes: 0.189 ms with
# tiles of 11 × 10 rows, 0.232 with 6 × 10, 0.216 with 8 × 8; two blocks per SM loop over the tiles. Both gradients:
# 0.61 ms in two planes and 0.38 in one; 0.94 and 0.57 with tiles of 8 rows.
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
    *_by_residue(),
    _row(MEASURED, TileUse("last pass", arithmetic="float32", layout="contiguous"), elements=1024),
    *_passes(MEASURED, "contiguous", 1024, 8, 2048),
    *_passes(MEASURED, "channels_last", 8192, 2, 8192),
    _row(MEASURED, TileUse("few channels"), depth=11, height=10, blocks=2),
    _row(MEASURED, TileUse("few channels' gradients"), height=16),
)

HOPPER = Tiles(
    TileTable(_HOPPER_ROWS),
    # Columns, steps of the sum, stages and warps: the best of 128 settings in fp16 over the five shapes of docs/gpu.md.
    in_place=(
        (64, _settings(columns=256, steps=32, stages=4, warps=4)),
        (128, _settings(columns=128, steps=64, stages=3, warps=4)),
    ),
    # The input's gradient, which has no epilogue to hide: 0.434 ms on chain 61 in bf16, 0.457 with the tile above,
    # 0.465 with the best packed GEMM, which also computes the padding in its rows of 34.
    in_place_back=_settings(columns=256, steps=64, stages=3, warps=8),
    # Chain 61: 0.346 ms in one plane (0.412 by `weight_gemm_for`'s rule), 1.54 in two (1.71). 32→32 at 2×128³: 0.665
    # (0.703).
    weight=(
        ((1, 128, 64), WeightTile(True, 64, 4, 4, 1)),
        ((2, 128, 64), WeightTile(True, 32, 2, 4, 2)),
        ((1, 64, 128), WeightTile(False, 32, 5, 4, 1)),
    ),
)


def _by_rule(origin: str) -> Tiles:
    """Tiles by rule: for GEMMs the largest that do not spill, because before Hopper operands take registers too."""
    return Tiles(
        TileTable(
            (
                _product(origin, "1 plane", rows=128, stages=3, warps=8),
                _product(origin, "2 planes", rows=64, stages=2, warps=8),
                _phases(origin, "1 plane", rows=128, stages=3, warps=8),
                _phases(origin, "2 planes", rows=64, stages=2, warps=8),
                *_passes(origin, "contiguous", 1024, 8, 2048),
                *_passes(origin, "channels_last", 8192, 2, 8192),
                _row(origin, TileUse("few channels"), depth=11, height=10, blocks=2),
            )
        )
    )


AMPERE, OTHERS = _by_rule(BY_RULE_80), _by_rule(RULE)
