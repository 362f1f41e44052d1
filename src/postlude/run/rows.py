"""layer_norm on a GPU: all fused steps in one reading and one writing of a value, rows of its last axes in tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Normalize
from postlude.plan import Plan
from postlude.plan.problem import Spec, memory_format, power_in, power_of_two
from postlude.run.launch import Launch, accumulator
from postlude.run.passes import Operands, accumulator_of
from postlude.run.programs import program

_TILE = 2048  # elements: rows are put together up to this
_ELEMENTS = 32  # of a tile for each thread, at most


class RowsPass:
    def __init__(self, plan: Plan, keeps_value: bool = False) -> None:
        from postlude.kernels.triton.rows import rows_kernel

        chain, value, last = plan.chain, plan.value, plan.passes[-1].last
        self.dtype = getattr(torch, plan.result_dtype)
        # Only a step after the norm that takes another tensor's layout makes it anything else than rows.
        layout = plan.result_layout if last == len(chain.steps) else value.layout
        self.format = memory_format(layout, chain.dims)
        self.overwrites = chain.producer is not None and not keeps_value and value.dtype == plan.result_dtype
        self.operands = Operands(chain, last, value)
        length, in_channel, rows, constants = rows_of(plan)
        steps = {"STEPS": program(chain, "rows", last, value.shape[1])}
        one_channel = not constants["SAMPLE"] and in_channel % constants["BLOCK_R"] == 0
        is_full = length == constants["BLOCK_L"] and rows % constants["BLOCK_R"] == 0
        flags = {"ONE_CHANNEL": one_channel, "FULL": is_full}
        constants = {**steps, **constants, **flags, "ACC": accumulator(accumulator_of(value))}
        grid = (-(-rows // constants["BLOCK_R"]),)
        numbers = (value.shape[1], in_channel, length, rows)
        self.launch = Launch(rows_kernel, grid, numbers, constants, warps_for(constants))

    def __call__(self, value: Tensor, _: object, tensors: Sequence[Tensor]) -> Tensor:
        """As FinishPass is called; moments are found on the way."""
        result = value if self.overwrites else torch.empty_like(value, dtype=self.dtype)
        self.launch(value, result, *self.operands(tensors, value))
        return result.contiguous(memory_format=self.format)


def rows_of(plan: Plan) -> tuple[int, int, int, dict[str, Any]]:
    """Elements of a row, rows of a sample's channel, rows in all, and the constants that say how they are cut."""
    value: Spec = plan.value
    norm = next(step for step in plan.chain.steps if isinstance(step, Normalize))
    length = math.prod(value.shape[-norm.axes :])
    is_sample = norm.axes == len(value.shape) - 1
    in_channel = 1 if is_sample else math.prod(value.shape[2:]) // length
    block = power_of_two(length)
    constants = {
        "SAMPLE": is_sample,
        "BLOCK_R": max(1, _TILE // block),
        "BLOCK_L": block,
        "ALIGN": power_in(length, 16),
    }
    return length, in_channel, math.prod(value.shape) // length, constants


def warps_for(constants: dict[str, Any]) -> int:
    elements: int = constants["BLOCK_R"] * constants["BLOCK_L"]
    return max(4, elements // (32 * _ELEMENTS))
