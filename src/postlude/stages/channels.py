"""The last pass of a chain that ends in a reduction over channels: one reading of the value, no such writing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.plan import Plan
from postlude.plan.channels import CHANNELS_WARPS, channels_kind, channels_tile
from postlude.plan.problem import power_in
from postlude.plan.program import fused_norm
from postlude.plan.tiles import pass_warps
from postlude.stages.cuts import accumulator, accumulator_of, forward_steps, is_wide, operands, sizes_of
from postlude.stages.normalize import per_group
from postlude.stages.trace import Unread, launch

_EACH = 16  # elements of a thread where a tile is small
_SPREAD = "[None, :]"  # of a number per channel over positions


def channels_pass(
    plan: Plan, value: Tensor, moments: tuple[Tensor, Tensor] | None, tensors: Sequence[Tensor]
) -> Tensor:
    """All steps that are left, and the reduction of what they give."""
    chain, spec, before, end = plan.chain, plan.value, plan.passes[-1].last - 1, plan.channels_end
    assert end is not None
    batch, channels, positions = sizes_of(spec)
    norm = fused_norm(chain)
    block, block_c = channels_tile(channels, positions)
    chunks, is_last = -(-positions // block), spec.layout == "channels_last"
    shape = (batch, *((1,) if end.keepdim else ()), *spec.shape[2:])
    result = torch.empty(shape, dtype=getattr(torch, plan.result_dtype), device=value.device)
    mean, rstd = moments or (Unread(value), Unread(value))
    launch(
        "channels",
        "channels_kernel",
        (batch * chunks,),
        [value, result, mean, rstd, *operands(chain, before, spec, tensors, value, plan.resumes_at)],
        (channels, positions, chunks, per_group(norm, spec)),
        {
            "NORM_STEPS_FN": forward_steps(chain, "whole", before, channels, plan.resumes_at, _SPREAD),
            "OP": channels_kind(end),
            "HAS_NORM": norm is not None,
            "BLOCK_S": block,
            "BLOCK_C": block_c,
            "IS_CHANNELS_LAST": is_last,
            "ALIGN": 1 if is_last else power_in(positions, 16),
            "USES_INT64": is_wide(spec),
            "ACC": accumulator(accumulator_of(spec)),
        },
        pass_warps(block * block_c, CHANNELS_WARPS, _EACH),
    )
    return result
