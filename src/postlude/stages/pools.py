"""The last pass of a chain with a pool: it reads the value once and writes the pooled value once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Scalar, Value
from postlude.derivatives import G
from postlude.expressions import Assign, Name, call
from postlude.plan import Plan
from postlude.plan.barriers import FusedPool
from postlude.plan.pools import POOL_WARPS, pool_tile, pooled_shape, unrolled_rows
from postlude.plan.problem import memory_format
from postlude.plan.tiles import pass_warps
from postlude.stages.cuts import accumulator, accumulator_of, is_wide, operands, sizes_of, steps_around
from postlude.stages.normalize import per_group
from postlude.stages.trace import Unread, launch

_EACH = 4  # windows per thread where a tile is small


def pools_pass(
    plan: Plan, value: Tensor, moments: tuple[Tensor, Tensor] | None, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """All remaining steps before the pool, the pool, and the steps after it; in training also max_pool's taps."""
    chain, spec, fused, acc = plan.chain, plan.value, plan.pool, accumulator_of(plan.value)
    assert fused is not None
    batch, channels, _ = sizes_of(spec)
    result, taps = _results(plan, fused, value)
    windows = math.prod(result.shape[2:])
    mean, rstd = moments or (Unread(value), Unread(value))
    tile = pool_tile(channels, windows, spec.layout == "channels_last")
    chunks = -(-windows // tile.block)
    before, after = steps_around(plan, fused.first - 1, fused.last + 1)
    launch(
        "pools",
        "pools_kernel",
        (batch * chunks, -(-channels // tile.block_c)) if tile.block_c else (batch * channels * chunks,),
        [
            *(value, result, Unread(value) if taps is None else taps, mean, rstd),
            *operands(chain, plan.passes[-1].last, spec, tensors, value, plan.resumes_at),
        ],
        (channels, chunks, per_group(plan.norm, spec)),
        {
            "NORM_STEPS_FN": before,
            "AFTER_FN": after,
            "HAS_NORM": plan.norm is not None,
            "OP": fused.pool.op,
            "HAS_TAPS": taps is not None,
            **windows_constants(fused, spec.shape[2:]),
            "UNROLLED": unrolled_rows(fused.pool),
            "BLOCK_S": tile.block,
            "BLOCK_C": tile.block_c,
            "HAS_SHORT_ROWS": tile.is_short,
            "USES_INT64": bool(tile.block_c) and is_wide(spec),
            "IS_OUT_CONTIGUOUS": plan.turns,
            "ACC": accumulator(acc),
        },
        pass_warps(tile.block * max(1, tile.block_c), POOL_WARPS, _EACH),
    )
    return result, taps


def _results(plan: Plan, fused: FusedPool, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Memory for the pooled value and, in training, for max_pool's taps."""
    shape, inside = pooled_shape(fused, plan.value.shape), memory_format(plan.value.layout, plan.chain.dims)
    layout = torch.contiguous_format if plan.turns else inside
    dtype = getattr(torch, plan.result_dtype)
    result = torch.empty(shape, dtype=dtype, device=value.device, memory_format=layout)
    has_taps = plan.trains and fused.pool.op == "max_pool"
    return result, torch.empty_like(result, dtype=torch.uint8, memory_format=inside) if has_taps else None


def windows_constants(fused: FusedPool, space: tuple[int, ...]) -> dict[str, Any]:
    """The spatial sizes of value, result and window as constants; in 2-D with a depth of one."""
    windows = fused.pool.windows
    out, flat = windows.output_space(space), (1,) * (3 - len(space))
    sizes = {
        ("D", "H", "W"): (*flat, *space),
        ("OD", "OH", "OW"): (*flat, *out),
        ("KD", "KH", "KW"): (*flat, *windows.kernel),
        ("STRIDE_D", "STRIDE_H", "STRIDE_W"): (*flat, *windows.stride),
        ("PD", "PH", "PW"): (*(0 for _ in flat), *windows.padding),
    }
    found: dict[str, Any] = {name: size for names, each in sizes.items() for name, size in zip(names, each)}
    found["HAS_BORDER"] = windows.has_border(space)
    found["IS_PADDING_COUNTED"] = fused.pool.counts_padding
    return {**found, "DIVISOR": fused.pool.divisor or 0}


def unpooling_lines(plan: Plan, count: int) -> tuple[Assign, ...]:
    """The gradient at the value before the pool, as an expression of a block whose steps have `count` tensors: those of
    the pooled value's gradient and, of a max_pool, of its taps follow them. None without a pool."""
    fused, spec = plan.pool, plan.value
    if fused is None:
        return ()
    pointers = [Name(f"a{count}"), Name(f"a{count + 1}" if fused.pool.op == "max_pool" else f"a{count}")]
    constants = {
        "IS_CHANNELS_LAST": spec.layout == "channels_last",
        "OP": fused.pool.op,
        "C": spec.shape[1],
        **windows_constants(fused, spec.shape[2:]),
    }
    block = (Value(0), Name("base"), Name("o_x"), Name("m_x"))
    term = call("pool_gradient", *pointers, *block, *(Scalar(constant) for constant in constants.values()))
    return (Assign((G,), term),)
