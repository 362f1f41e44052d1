"""The passes over a value that is in memory: moments, their combination, and everything in one reading and writing.

Each is made once for a plan, with its launches ready, and called for every tensor that comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Chain, Normalize
from postlude.plan import Plan
from postlude.plan.problem import Spec, memory_format, power_in, power_of_two
from postlude.plan.tiles import pass_warps
from postlude.plan.types import Moments, Tile
from postlude.run.launch import Launch, accumulator
from postlude.run.programs import program
from postlude.steps import OPERANDS, pass_slots, reads_rows

_WARPS = 4
_LAST_FINISH_WARPS = 8  # channels-last tiles of the last pass are four times as large
# Elements of short rows for each thread of the moments pass: no fewer warps than one can share a row, for each costs
# the sums over it five shuffles. Float64 has no registers for so many.
_SUMMED = {torch.float32: 32, torch.float64: 8}


@dataclass(frozen=True)
class Partials:
    """Moments by chunks of positions, to be combined."""

    means: Tensor  # [N, C, CHUNKS]; sums where only the mean is wanted
    squares: Tensor  # [N, C, CHUNKS], sums of squared deviations
    counts: Tensor  # [N, CHUNKS]


class Operands:
    """The tensors that a pass reads beside its value."""

    def __init__(self, chain: Chain, last: int, value: Spec, first: int = 0) -> None:
        self.slots = pass_slots(chain, last, first)
        full = memory_format(value.layout, chain.dims)
        self._formats = [full if chain.roles[s] == "full" else torch.contiguous_format for s in self.slots]
        # The last place holds the size of a sample where a step has to know which one it works on (see emit.py).
        self._sizes = [math.prod(value.shape[1:])] if reads_rows(chain, last, first) else []
        self._left = OPERANDS - len(self.slots) - len(self._sizes)

    def __call__(self, tensors: Sequence[Tensor], unread: Tensor) -> list[Tensor | int]:
        """In the value's layout; `unread` fills the places that no step reads."""
        found = [tensors[s] for s in self.slots]
        for number, form in enumerate(self._formats):
            if not found[number].is_contiguous(memory_format=form):
                found[number] = found[number].contiguous(memory_format=form)
        return [*found, *[unread] * self._left, *self._sizes]


class MomentsPass:
    def __init__(self, plan: Plan) -> None:
        from postlude.kernels.triton import normalize as kernels

        value, cut, first = plan.value, moments_cut(plan.value, tile_of(plan)), plan.resumes_at
        item = next(one for one in plan.passes if isinstance(one.sink, Moments))
        assert isinstance(item.sink, Moments)
        batch, channels, positions = sizes_of(value)
        self.chunks = cut.chunks(positions)
        self.shape = (batch, channels, self.chunks)
        self.acc = accumulator_of(value)
        self.operands = Operands(plan.chain, item.last, value, first)
        constants: dict[str, Any] = {
            "BEFORE": program(plan.chain, "before", item.last, channels, first),
            "SQUARES": item.sink.squares,
            **cut.constants(value),
            "ACC": accumulator(self.acc),
        }
        kernel = kernels.last_moments_kernel if cut.block_c else kernels.row_moments_kernel
        numbers = (channels, positions, self.chunks, cut.tiles)
        warps = cut.warps(value, _WARPS, _SUMMED[self.acc] if cut.is_short else 8)
        self.launch = Launch(kernel, cut.grid(value), numbers, constants, warps)

    def __call__(self, value: Tensor, tensors: Sequence[Tensor]) -> Partials:
        means = torch.empty(self.shape, dtype=self.acc, device=value.device)
        squares = torch.empty_like(means)
        counts = torch.empty((self.shape[0], self.chunks), dtype=self.acc, device=value.device)
        self.launch(value, means, squares, counts, *self.operands(tensors, value))
        return Partials(means, squares, counts)


class Combine:
    """Partial moments to one mean and one reciprocal deviation per sample and group."""

    def __init__(self, step: Normalize, value: Spec, chunks: int) -> None:
        from postlude.kernels.triton.normalize import combine_moments_kernel

        batch, channels, positions = sizes_of(value)
        groups = step.groups or channels
        self.per_group = channels // groups
        self.groups = batch * groups
        parts, count = self.per_group * chunks, float(self.per_group * positions)
        block, warps = adding(parts)
        constants = {"BLOCK": block, "ACC": accumulator(accumulator_of(value))}
        numbers = (groups, parts, chunks, count, step.eps)
        self.launch = Launch(combine_moments_kernel, (self.groups,), numbers, constants, warps)

    def __call__(self, partials: Partials, tensors: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002  as CombineBatch takes
        both = torch.empty((2, self.groups), dtype=partials.means.dtype, device=partials.means.device)
        mean, rstd = both[0], both[1]
        self.launch(partials.means, partials.squares, partials.counts, mean, rstd)
        return mean, rstd


class FinishPass:
    """All steps that are left of those that are fused, in one reading and one writing of the value."""

    def __init__(self, plan: Plan, per_group: int, keeps_value: bool = False) -> None:
        from postlude.kernels.triton import normalize as kernels

        chain, value, last = plan.chain, plan.value, plan.passes[-1].last
        cut, is_last = last_cut(value, tile_of(plan)), bool(tile_of(plan).block_c)
        _, channels, positions = sizes_of(value)
        has_norm = any(isinstance(step, Normalize) for step in chain.steps[:last])
        ends_here = last == len(chain.steps)
        # A channels-last value may have to become a contiguous result, as PyTorch's norm would have left it.
        self.turns = is_last and ends_here and plan.result_layout == "contiguous"
        self.dtype = getattr(torch, plan.result_dtype)
        is_ours = chain.producer is not None and not keeps_value
        self.overwrites = is_ours and not self.turns and value.dtype == plan.result_dtype
        self.operands = Operands(chain, last, value, plan.resumes_at)
        constants: dict[str, Any] = {
            "WHOLE": program(chain, "whole", last, channels, plan.resumes_at),
            "HAS_NORM": has_norm,
            **cut.constants(value),
        }
        if cut.block_c:
            constants["CONTIGUOUS_OUT"] = self.turns
        constants["ACC"] = accumulator(accumulator_of(value))
        kernel = kernels.last_finish_kernel if cut.block_c else kernels.row_finish_kernel
        numbers = (channels, positions, cut.chunks(positions), per_group)
        warps = cut.warps(value, _LAST_FINISH_WARPS if is_last else _WARPS)
        self.launch = Launch(kernel, cut.grid(value), numbers, constants, warps)

    def __call__(self, value: Tensor, moments: tuple[Tensor, Tensor] | None, tensors: Sequence[Tensor]) -> Tensor:
        if self.overwrites:
            result = value
        elif self.turns:
            result = torch.empty(value.shape, dtype=self.dtype, device=value.device)
        else:
            result = torch.empty_like(value, dtype=self.dtype)
        mean, rstd = moments or (value, value)  # unread without a norm
        self.launch(value, result, mean, rstd, *self.operands(tensors, value))
        return result


def adding(parts: int, most: int = 4096) -> tuple[int, int]:
    """Numbers that a program adds up at a time, and its warps: where programs are few, each mostly waits."""
    block = min(most, max(32, power_of_two(parts)))
    return block, 16 if block > 4096 else 8 if block > 1024 else 4


@dataclass(frozen=True)
class Cut:
    """How one pass over a value is cut into programs."""

    block: int  # elements of a row, or positions of a tile of several channels
    block_c: int  # channels of a tile; 0 where it lies in one row, which is one channel's
    is_short: bool  # a tile is `block_c` whole rows of a contiguous value
    tiles: int = 1  # of a program, one behind the other

    def chunks(self, positions: int) -> int:
        return -(-positions // (self.block * self.tiles))

    def grid(self, value: Spec) -> tuple[int, ...]:
        batch, channels, positions = sizes_of(value)
        chunks = self.chunks(positions)
        return (batch * chunks, -(-channels // self.block_c)) if self.block_c else (batch * channels * chunks,)

    def constants(self, value: Spec) -> dict[str, Any]:
        _, channels, positions = sizes_of(value)
        align = power_in(positions, 16)
        if not self.block_c:
            return {"BLOCK": self.block, "ALIGN": align}
        several = {"BLOCK": self.block, "BLOCK_C": self.block_c, "SHORT": self.is_short}
        return {**several, "ALIGN": align if self.is_short else 1, "WIDE": channels * positions >= 1 << 31}

    def warps(self, value: Spec, most: int, each: int = 8) -> int:
        """Fewer than `most` where rows are too short for it: then `each` elements for each thread."""
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


def tile_of(plan: Plan) -> Tile:
    assert plan.tile is not None
    return plan.tile


def sizes_of(value: Spec) -> tuple[int, int, int]:
    return value.shape[0], value.shape[1], math.prod(value.shape[2:])


def accumulator_of(value: Spec) -> torch.dtype:
    return torch.float64 if value.dtype == "float64" else torch.float32
