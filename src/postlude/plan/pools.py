"""A pool behind the last steps on a GPU: a sink of the last pass, which reads each window and writes what it gives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from postlude.chain import Chain, Pool
from postlude.plan.problem import power_of_two
from postlude.plan.program import FusedPool, fused_pool, row_norm
from postlude.plan.tiles import short_rows

# Windows of a tile: each thread has four, and the loads of a row of every one of them in flight.
_WINDOWS, _LONGEST = 512, 64
POOL_WARPS = 4
_UNROLLED = 8  # taps: a loop over the rows of a larger window, which would be that many copies of the steps


@dataclass(frozen=True)
class PoolTile:
    """How the last pass is cut where it ends in a pool; as `Cut` of the passes over a value."""

    block: int  # windows
    block_c: int  # channels; 0 where a tile lies in one row of windows, which is one channel's
    is_short: bool


def why_pool_is_apart(chain: Chain) -> str | None:
    """Why a pool of a chain is PyTorch's, where it is."""
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
    """Rows of taps that the pass has side by side."""
    rows = math.prod(pool.windows.kernel[:-1])
    return rows if pool.windows.taps <= _UNROLLED else 1


def pooled_shape(fused: FusedPool, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], *fused.pool.windows.output_space(shape[2:]))
