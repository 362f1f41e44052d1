"""A pool after the fused steps on a GPU: the last pass reads each window and writes the pooled value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from postlude.chain import Chain, Pool
from postlude.plan.barriers import FusedPool, fused_pool, row_norm
from postlude.plan.problem import power_of_two
from postlude.plan.tiles import short_rows

# Windows of a tile: each thread has four, with the loads of one row of each in flight.
_WINDOWS, _LONGEST = 512, 64
POOL_WARPS = 4
_UNROLLED = 8  # most taps that are unrolled: each is a copy of the steps, so larger windows loop over their rows


@dataclass(frozen=True)
class PoolTile:
    """The tile of a last pass that ends in a pool, like `Cut` for the other passes."""

    block: int  # windows
    block_c: int  # channels; 0 if a tile has windows of one channel only
    is_short: bool


def why_pool_is_apart(chain: Chain) -> str | None:
    """Why PyTorch runs a chain's pool; None if it is fused."""
    fused = fused_pool(chain)
    left = chain.steps if fused is None else chain.steps[fused.last :]
    step = next((step for step in left if isinstance(step, Pool)), None)
    if step is None:
        return None
    why = "it follows another pool" if fused is not None else "it follows a second norm or a reduction"
    if row_norm(chain) is not None:
        why = "the tiles of a layer_norm are rows"
    return f"{step.op} is PyTorch's: {why}"


def pool_tile(channels: int, windows: int, is_channels_last: bool) -> PoolTile:
    if is_channels_last:
        block_c = min(_LONGEST, power_of_two(channels))
        return PoolTile(min(power_of_two(windows), _WINDOWS // block_c), block_c, False)
    rows = short_rows(_WINDOWS, channels, windows)
    if rows > 1:
        return PoolTile(power_of_two(windows), rows, True)
    return PoolTile(min(_WINDOWS, power_of_two(windows)), 0, False)


def unrolled_rows(pool: Pool) -> int:
    """Rows of a window's taps that the pass unrolls."""
    rows = math.prod(pool.windows.kernel[:-1])
    return rows if pool.windows.taps <= _UNROLLED else 1


def pooled_shape(fused: FusedPool, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], *fused.pool.windows.output_space(shape[2:]))
