"""The last pass of a chain with a softmax or a reduction over channels: it reads the value once and writes at most
once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.plan import Plan
from postlude.plan.channels import CHANNELS_WARPS, channels_kind, channels_tile
from postlude.plan.problem import power_in
from postlude.plan.program import fused_norm
from postlude.plan.tiles import pass_warps
from postlude.stages.cuts import accumulator, accumulator_of, is_wide, operands, sizes_of, steps_around
from postlude.stages.normalize import per_group
from postlude.stages.trace import Unread, launch

_EACH = 16  # elements per thread where a tile is small
_SPREAD = "[None, :]"  # broadcasts a number per channel over positions


def channels_pass(
    plan: Plan,
    value: Tensor,
    moments: tuple[Tensor, Tensor] | None,
    tensors: Sequence[Tensor],
    keeps_value: bool = False,
) -> Tensor:
    """All remaining steps: those before the reduction over channels, the reduction, and those after it."""
    chain, spec, last, over = plan.chain, plan.value, plan.passes[-1].last, plan.over_channels
    assert over is not None
    batch, channels, positions = sizes_of(spec)
    norm, end = fused_norm(chain), plan.channels_end
    block, block_c = channels_tile(channels, positions)
    chunks, is_last = -(-positions // block), spec.layout == "channels_last"
    turns = over.reduce is None and is_last and plan.result_layout == "contiguous"
    result, first = _result(plan, value, turns, keeps_value), plan.resumes_at
    mean, rstd = moments or (Unread(value), Unread(value))
    around = (last, last + 1) if over.reduce is None else (over.reduce - 1, over.reduce + 1)
    before, after = steps_around(plan, *around, _SPREAD)
    launch(
        "channels",
        "channels_kernel",
        (batch * chunks,),
        [value, result, mean, rstd, *operands(chain, last, spec, tensors, value, first)],
        (channels, positions, chunks, per_group(norm, spec)),
        {
            "NORM_STEPS_FN": before,
            "AFTER_FN": after,
            "OP": "none" if end is None else channels_kind(end.op),
            "HAS_NORM": norm is not None,
            "BLOCK_S": block,
            "BLOCK_C": block_c,
            "IS_CHANNELS_LAST": is_last,
            "IS_OUT_CONTIGUOUS": turns,
            "ALIGN": 1 if is_last else power_in(positions, 16),
            "USES_INT64": is_wide(spec),
            "ACC": accumulator(accumulator_of(spec)),
        },
        pass_warps(block * block_c, CHANNELS_WARPS, _EACH),
    )
    return result


def _result(plan: Plan, value: Tensor, turns: bool, keeps_value: bool) -> Tensor:
    """The value itself if it may be overwritten; a new tensor if the result has no channels or another layout."""
    spec, end, dtype = plan.value, plan.channels_end, getattr(torch, plan.result_dtype)
    if end is not None:
        shape = (spec.shape[0], *((1,) if end.keepdim else ()), *spec.shape[2:])
        return torch.empty(shape, dtype=dtype, device=value.device)
    if turns:
        return torch.empty(value.shape, dtype=dtype, device=value.device)
    is_ours = plan.chain.producer is not None and not keeps_value
    return value if is_ours and spec.dtype == plan.result_dtype else torch.empty_like(value, dtype=dtype)
