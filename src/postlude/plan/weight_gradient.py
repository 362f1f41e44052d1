"""The GEMM for the weight's gradient: split-K over positions, in which tiles and how many parts."""

from __future__ import annotations

import dataclasses

from postlude.card_tiles import TileOrigin, WeightTile
from postlude.cards import WGMMA_ROWS
from postlude.chain import Convolution
from postlude.hardware import Machine
from postlude.plan.gemm import Arithmetic, WeightGemm, padded_channels
from postlude.plan.problem import power_of_two
from postlude.plan.tiles import product_uses, rows_for
from postlude.plan.volume import volume_for


def weight_gemm_for(
    conv: Convolution, space: tuple[int, ...], arithmetic: Arithmetic, machine: Machine, width: int = 1
) -> WeightGemm:
    """The GEMM for the weight's gradient, of a convolution for which `unsupported` is None, or of a strided one.

    `width` is that of the GEMM for the input's gradient, so that both read the same packed gradient.
    """
    neighbours = neighbours_for(conv, arithmetic)
    channels, out_channels = padded_channels(conv.in_channels), padded_channels(conv.out_channels)
    is_exact = arithmetic.is_exact
    volume = volume_for(conv, space, width, neighbours)
    shared = _shared_taps(volume.kernel[2])
    rows, columns = min(128, max(16, power_of_two(conv.out_channels))), min(64, max(16, power_of_two(conv.in_channels)))
    if neighbours > 1:
        rows, columns = 64, min(256, power_of_two((neighbours - 1 + volume.kernel[2]) * channels))
        shared = _shared_taps(volume.kernel[1]) if arithmetic.planes == 1 and columns <= 128 else 1
    if is_exact:
        rows, columns = min(rows, 32), min(columns, 32)
    measured = machine.card.tiles.weight_of(arithmetic.planes, rows, columns)
    ruled = WeightTile(False, 16 if is_exact else 64, *_weight_pipeline(arithmetic, neighbours, rows, columns))
    if volume.has_residues and not is_exact:
        ruled = WeightTile(rows < WGMMA_ROWS <= columns, 32, 2, 4, 3)
    turned, block_k, stages, warps, programs = measured or ruled
    (use,) = product_uses("weight's gradient", conv, arithmetic, machine)
    gemm = WeightGemm(
        *(arithmetic, volume, channels, out_channels, neighbours, shared, rows, columns),
        *(block_k, 1, stages, warps, turned, None if is_exact else TileOrigin(use, None)),
    )
    for row in rows_for(machine, use):
        settings, origin = row.values, TileOrigin(use, row)
        tuned = dataclasses.replace(gemm, stages=settings["stages"], warps=settings["warps"], origin=origin)
        if not is_exact and machine.card.holds(tuned.shared_bytes):
            gemm, programs = tuned, settings["programs"]
    tiles = gemm.groups * -(-gemm.result[0] // rows) * -(-gemm.result[1] // columns)
    return dataclasses.replace(gemm, splits=max(1, programs * machine.card.multiprocessors // tiles))


def _shared_taps(count: int) -> int:
    """How many taps of a row or column share one tile of the gradient."""
    return next(taps for taps in (3, 2, 1) if count % taps == 0)


def neighbours_for(conv: Convolution, arithmetic: Arithmetic) -> int:
    """Positions per row of the weight gradient's GEMM: with 16 or 32 output channels, enough to fill wgmma's rows."""
    out_channels = padded_channels(conv.out_channels)
    is_short = out_channels in (16, 32) and conv.kernel[-1] > 1 and not arithmetic.is_exact
    is_short &= all(size == 1 for size in conv.stride)
    return WGMMA_ROWS // out_channels if is_short else 1


def _weight_pipeline(arithmetic: Arithmetic, neighbours: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Stages, warps and programs per multiprocessor, for cases without a measurement."""
    stages = 2 if arithmetic.planes == 2 or arithmetic.is_exact or neighbours > 1 else 3
    return stages, 4 if rows == 64 and columns < 256 else 8, 2
