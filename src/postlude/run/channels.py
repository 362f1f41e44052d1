"""The last pass of a chain that ends in a reduction over channels: one reading of the value, no such writing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Normalize
from postlude.plan import Plan
from postlude.plan.channels import CHANNELS_WARPS, channels_kind, channels_tile
from postlude.plan.problem import power_in
from postlude.plan.tiles import pass_warps
from postlude.run.launch import Launch, accumulator
from postlude.run.passes import Operands, accumulator_of, sizes_of
from postlude.run.programs import program

_EACH = 16  # elements of a thread where a tile is small
_SPREAD = "[None, :]"  # of a number per channel over positions


class ChannelsPass:
    """All steps that are left, and the reduction of what they give."""

    def __init__(self, plan: Plan, per_group: int) -> None:
        from postlude.kernels.triton.channels import channels_kernel

        chain, value, before, end = plan.chain, plan.value, plan.passes[-1].last - 1, plan.channels_end
        assert end is not None
        batch, channels, positions = sizes_of(value)
        block, block_c = channels_tile(channels, positions)
        chunks, is_last = -(-positions // block), value.layout == "channels_last"
        self.dtype = getattr(torch, plan.result_dtype)
        self.shape = (batch, *((1,) if end.keepdim else ()), *value.shape[2:])
        self.operands = Operands(chain, before, value, plan.resumes_at)
        constants: dict[str, Any] = {
            "WHOLE": program(chain, "whole", before, channels, plan.resumes_at, _SPREAD),
            "OP": channels_kind(end),
            "HAS_NORM": any(isinstance(step, Normalize) for step in chain.steps),
            "BLOCK": block,
            "BLOCK_C": block_c,
            "LAST": is_last,
            "ALIGN": 1 if is_last else power_in(positions, 16),
            "WIDE": channels * positions >= 1 << 31,
            "ACC": accumulator(accumulator_of(value)),
        }
        numbers = (channels, positions, chunks, per_group)
        warps = pass_warps(block * block_c, CHANNELS_WARPS, _EACH)
        self.launch = Launch(channels_kernel, (batch * chunks,), numbers, constants, warps)

    def __call__(self, value: Tensor, moments: tuple[Tensor, Tensor] | None, tensors: Sequence[Tensor]) -> Tensor:
        result = torch.empty(self.shape, dtype=self.dtype, device=value.device)
        mean, rstd = moments or (value, value)  # unread without a norm
        self.launch(value, result, mean, rstd, *self.operands(tensors, value))
        return result
