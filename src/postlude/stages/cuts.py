"""How a pass over a value is divided into programs, and what such passes read besides the value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from postlude.chain import Chain
from postlude.emit import emit
from postlude.expressions import Function
from postlude.plan import Plan
from postlude.plan.passes import Tile
from postlude.plan.problem import Spec, memory_format, power_in, power_of_two
from postlude.plan.program import Steps, Word
from postlude.plan.tiles import pass_warps
from postlude.stages.trace import Pointer, Unread
from postlude.steps import OPERANDS, forward, pass_slots, reads_rows


class Partials(NamedTuple):
    """Partial moments, one for each chunk of positions."""

    means: Tensor  # [N, C, CHUNKS]; sums where only the mean is wanted
    squares: Tensor  # [N, C, CHUNKS], sums of squared deviations
    counts: Tensor  # [N, CHUNKS]

    @property
    def chunks(self) -> int:
        return self.counts.shape[1]


def operands(
    chain: Chain, last: int, value: Spec, tensors: Sequence[Tensor], unread: Tensor, first: int = 0
) -> list[Pointer]:
    """The tensors that steps up to `last` read, in the value's layout; `unread` fills the places that no step reads.

    The last place holds the size of a sample where a step has to know which one it works on (see emit.py).
    """
    full = memory_format(value.layout, chain.dims)
    found: list[Pointer] = []
    for slot in pass_slots(chain, last, first):
        form = full if chain.roles[slot] == "full" else torch.contiguous_format
        found.append(tensors[slot].contiguous(memory_format=form))
    sizes = [math.prod(value.shape[1:])] if reads_rows(chain, last, first) else []
    return [*found, *[Unread(unread)] * (OPERANDS - len(found) - len(sizes)), *sizes]


def steps_of(function: Function, channels: int = 0, spread: str = "") -> Steps:
    """Expressions as a device function, which a kernel takes as a compile-time constant."""
    return Steps(function.name, emit(function, channels, spread))


def forward_steps(chain: Chain, name: str, last: int, channels: int, first: int = 0, spread: str = "") -> Steps:
    return steps_of(forward(chain, name, last, first), channels, spread)


def steps_around(plan: Plan, before: int, after: int, spread: str = "") -> tuple[Steps, Steps]:
    """The steps up to `before` and those from `after` on, for a pass that does something of its own in between.

    Both functions take the tensors of all steps.
    """
    chain, last, start = plan.chain, plan.passes[-1].last, plan.resumes_at
    slots, channels = pass_slots(chain, last, start), plan.value.shape[1]
    functions = forward(chain, "whole", before, start), forward(chain, "after", last, after)
    first, second = (replace(function, slots=slots) for function in functions)
    return steps_of(first, channels, spread), steps_of(second, channels)


@dataclass(frozen=True)
class Cut:
    """How one pass over a value is divided into programs."""

    block: int  # elements of a row, or positions of a tile of several channels
    block_c: int  # channels of a tile; 0 where it lies in one row, which is one channel's
    is_short: bool  # a tile is `block_c` whole rows of a contiguous value
    tiles: int = 1  # per program, one after the other

    def chunks(self, positions: int) -> int:
        return -(-positions // (self.block * self.tiles))

    def grid(self, value: Spec) -> tuple[int, ...]:
        batch, channels, positions = sizes_of(value)
        chunks = self.chunks(positions)
        return (batch * chunks, -(-channels // self.block_c)) if self.block_c else (batch * channels * chunks,)

    def constants(self, value: Spec) -> dict[str, Any]:
        positions = sizes_of(value)[2]
        is_row = not self.block_c
        return {
            "BLOCK_S": self.block,
            "BLOCK_C": self.block_c,
            "HAS_SHORT_ROWS": self.is_short,
            "ALIGN": power_in(positions, 16) if is_row or self.is_short else 1,
            "USES_INT64": not is_row and is_wide(value),
        }

    def warps(self, value: Spec, most: int, each: int = 8) -> int:
        """The number of warps: `most`, or fewer if rows are short, so that each thread has `each` elements."""
        is_long = self.block < sizes_of(value)[2]
        return most if is_long else pass_warps(self.block * max(1, self.block_c), most, each)


def last_cut(value: Spec, tile: Tile) -> Cut:
    if tile.rows:
        return Cut(power_of_two(sizes_of(value)[2]), tile.rows, True)
    return Cut(tile.block, tile.block_c, False)


def moments_cut(value: Spec, tile: Tile) -> Cut:
    if tile.moments_rows:
        return Cut(power_of_two(sizes_of(value)[2]), tile.moments_rows, True)
    return Cut(tile.moments_block, tile.block_c, False, tile.tiles)


def adding(parts: int, most: int = 4096) -> tuple[int, int]:
    """How many numbers a program loads at a time, and its warps: programs are few, so each needs many loads in
    flight."""
    block = min(most, max(32, power_of_two(parts)))
    return block, 16 if block > 4096 else 8 if block > 1024 else 4


def result_like(plan: Plan, value: Tensor, is_ours: bool, turns: bool) -> Tensor:
    """Memory for the last pass's result of the value's size, contiguous if the pass `turns`: the value's own if it
    `is_ours` and nothing reads it afterwards."""
    dtype = getattr(torch, plan.result_dtype)
    if turns:
        return torch.empty(value.shape, dtype=dtype, device=value.device)
    is_free = is_ours and not plan.keeps_value and plan.value.dtype == plan.result_dtype
    return value if is_free else torch.empty_like(value, dtype=dtype)


def tile_of(plan: Plan) -> Tile:
    assert plan.tile is not None
    return plan.tile


def sizes_of(value: Spec) -> tuple[int, int, int]:
    return value.shape[0], value.shape[1], math.prod(value.shape[2:])


def is_wide(value: Spec) -> bool:
    """Whether offsets within a sample need 64 bits."""
    return math.prod(value.shape[1:]) >= 1 << 31


def accumulator_of(value: Spec) -> torch.dtype:
    return torch.float64 if value.dtype == "float64" else torch.float32


def accumulator(dtype: torch.dtype) -> Word:
    """Triton's name for the dtype of the accumulator."""
    return Word("tl.float64" if dtype == torch.float64 else "tl.float32")
