"""The gradients of a plan's fused steps on a GPU: sums over the norm's result, then one pass for everything.

`GradientPasses` is made once for a plan and for the slots whose gradient is wanted, with its launches ready.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude import reverse
from postlude.chain import Normalize
from postlude.plan import Plan
from postlude.plan.gemm import Arithmetic
from postlude.plan.problem import Spec, memory_format, power_of_two
from postlude.plan.program import last_fused_step
from postlude.plan.types import Tile
from postlude.run.batch import CombineBatchSums
from postlude.run.last_gradient import LastGradientPass, what_is_computed
from postlude.run.launch import Launch, accumulator
from postlude.run.packed_gradient import PackedGradientPass
from postlude.run.packing import InputPacking
from postlude.run.passes import Cut, Operands, accumulator_of, adding, last_cut, moments_cut, sizes_of, tile_of
from postlude.run.programs import composed

# Elements of a tile at most, a quarter in float64: each needs registers for two values and, in the first pass, sums.
_MOST, _MOST_SUMMED = 4096, 2048
_ROW_WARPS, _LAST_WARPS = 4, 8  # channels-last tiles are larger, and keep more per element


class GradientPasses:
    """Gradients of the chain's steps up to the last fused one, from the gradient of that one's value.

    `needs` are the slots whose gradient is wanted. The input's and the weight's are made by the convolution from the
    gradient at the first value, which is always computed; without a convolution it is the input's. With `packing`,
    that gradient comes packed.
    """

    def __init__(self, plan: Plan, needs: frozenset[int], packing: InputPacking | None = None) -> None:
        chain, value, last = plan.chain, plan.value, last_fused_step(plan.chain)
        reason = reverse.unsupported_gradient(chain, last)
        if reason is not None:
            raise ValueError(f"no gradient passes: {reason}")
        self.needs, self.wanted = needs, reverse.wanted(chain, last, needs)
        self.format = memory_format(value.layout, chain.dims)
        self.dtype = getattr(torch, plan.result_dtype)
        self.operands = Operands(chain, last, value)
        self.norm = next((step for step in chain.steps[:last] if isinstance(step, Normalize)), None)
        channels, tile, per_group = value.shape[1], _tile(plan), 1
        gradient = reverse.gradient(chain, last, needs, plan.from_result)
        read = gradient.loaded
        self.sums: SumsPass | None = None
        self.combine: CombineSums | CombineBatchSums | None = None
        if self.norm is not None:
            sums = reverse.sums(chain, last, needs)
            read |= sums.loaded
            per_group = channels // (self.norm.groups or channels)
            self.sums = SumsPass(value, tile, composed(sums, channels), 2 + len(self.wanted.sums), per_group)
            has_weight, chunks = self.norm.weight is not None, self.sums.chunks
            self.combine = (
                CombineBatchSums(value, chunks, has_weight)
                if self.norm.over == "batch"
                else CombineSums(value, chunks, per_group, has_weight)
            )
        rest = (composed(gradient, channels), self.norm, self.wanted, per_group)
        self.gradient: LastGradientPass = (
            GradientPass(value, tile, plan.largest_found, *rest)
            if packing is None
            else PackedGradientPass(value, packing, *rest)
        )
        vectors = self._vectors()
        self.rows = {slot: planes for slot, planes in vectors.items() if chain.roles[slot] == "row"}
        self.vectors = {slot: planes for slot, planes in vectors.items() if slot not in self.rows}
        self.add = AddChannels(value, None if self.sums is None else self.sums.shape, self.gradient.shape)
        # A residual's gradient does not depend on it, as a rule: then it need not be there at all.
        self.unread = {slot for slot in self.operands.slots if chain.roles[slot] == "full"} - read

    def __call__(
        self,
        value: Tensor,
        moments: tuple[Tensor, Tensor] | None,
        dy: Tensor,
        tensors: Sequence[Tensor],
        largest: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The gradient at the first value (packed, if so asked for), and each slot's in its dtype.

        `value` is the convolution's result without its bias, or the input, or the chain's result where the plan says
        so; `moments` the norm's mean and rstd.
        """
        value = value.contiguous(memory_format=self.format)
        dy = dy.to(self.dtype).contiguous(memory_format=self.format)
        operands = self.operands([value if slot in self.unread else t for slot, t in enumerate(tensors)], value)
        means = group_means = moments or (value, value)  # unread without a norm
        sums = None
        if self.sums is not None and self.combine is not None and self.norm is not None:
            sums = self.sums(value, dy, means, operands)
            weight = None if self.norm.weight is None else tensors[self.norm.weight.index].contiguous()
            group_means = self.combine(sums, weight)
        dtypes = [tensors[slot].dtype for slot in self.wanted.full]
        dv0, totals, full = self.gradient(value, dy, (*means, *group_means), operands, dtypes, largest)
        gradients = dict(zip(self.wanted.full, full))
        if self.vectors:
            dtype = functools.reduce(torch.promote_types, [tensors[slot].dtype for slot in self.vectors])
            added = self.add(sums, totals, dtype)
            for slot, rows in self.vectors.items():
                total = functools.reduce(torch.add, [added[row] for row in rows])
                total = total.sum() if tensors[slot].numel() == 1 else total  # one number for all channels
                gradients[slot] = total.to(tensors[slot].dtype).view(tensors[slot].shape)
        for slot, planes in self.rows.items():
            parts = [_plane(sums, totals, plane).sum(-1, dtype=torch.float64) for plane in planes]  # [N, C]
            gradients[slot] = functools.reduce(torch.add, parts).to(tensors[slot].dtype).view(tensors[slot].shape)
        return dv0, gradients

    def _vectors(self) -> dict[int, list[int]]:
        """Slots of vectors that need a gradient, and the sums that make it: the norm's, a step's, or both."""
        slots: list[int | None] = []
        if self.norm is not None:
            norm = (self.norm.bias, self.norm.weight)
            slots += [None if slot is None else slot.index for slot in norm] + list(self.wanted.sums)
        slots += self.wanted.totals
        found: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if slot is not None and slot in self.needs:
                found.setdefault(slot, []).append(row)
        return found


class SumsPass:
    """Sums per sample, channel and chunk of dn, of dn · x̂ and of the gradients of vectors after the norm."""

    def __init__(self, value: Spec, tile: Tile, program: Any, count: int, per_group: int) -> None:
        from postlude.kernels.triton import gradient as kernels

        batch, channels, positions = sizes_of(value)
        cut = moments_cut(value, tile)
        self.chunks = cut.chunks(positions)
        self.shape = (count, batch, channels, self.chunks)
        self.acc = accumulator_of(value)
        constants: dict[str, Any] = {
            "SUMS": program,
            "COUNT": count,
            **cut.constants(value),
            "ACC": accumulator(self.acc),
        }
        kernel = kernels.last_sums_kernel if cut.block_c else kernels.row_sums_kernel
        numbers = (channels, positions, self.chunks, cut.tiles, per_group, batch * channels * self.chunks)
        self.launch = Launch(kernel, cut.grid(value), numbers, constants, _warps(cut, value))

    def __call__(self, value: Tensor, dy: Tensor, means: tuple[Tensor, Tensor], operands: list[Tensor | int]) -> Tensor:
        sums = torch.empty(self.shape, dtype=self.acc, device=value.device)
        self.launch(value, dy, *means, sums, *operands)
        return sums


class CombineSums:
    """The means over a group of γ · dn and of γ · dn · x̂."""

    def __init__(self, value: Spec, chunks: int, per_group: int, has_weight: bool) -> None:
        from postlude.kernels.triton.gradient import combine_sums_kernel

        batch, channels, positions = sizes_of(value)
        groups = channels // per_group
        self.shape = (2, batch * groups)
        numbers = (groups, per_group, positions, chunks, batch * channels * chunks)
        block, warps = adding(per_group * chunks, most=1024)
        constants = {"HAS_WEIGHT": has_weight, "BLOCK": block}
        self.launch = Launch(combine_sums_kernel, (batch * groups,), numbers, constants, warps)

    def __call__(self, sums: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        both = torch.empty(self.shape, dtype=sums.dtype, device=sums.device)
        a, b = both[0], both[1]
        self.launch(sums, sums if weight is None else weight, a, b)
        return a, b


class AddChannels:
    """Sums [COUNT, N, C, CHUNKS] of both passes over samples and chunks, in one launch."""

    def __init__(self, value: Spec, first: tuple[int, ...] | None, second: tuple[int, ...]) -> None:
        from postlude.kernels.triton.gradient import add_channels_kernel

        batch, channels, _ = sizes_of(value)
        rows, chunks = (0, 1) if first is None else (first[0], first[3])
        self.shape = (rows + second[0], channels)
        numbers = (batch, channels, chunks, second[3], rows)
        block, warps = adding(batch * max(chunks, second[3]))
        self.launch = Launch(add_channels_kernel, self.shape, numbers, {"BLOCK": block}, warps)

    def __call__(self, first: Tensor | None, second: Tensor, dtype: torch.dtype) -> Tensor:
        added = torch.empty(self.shape, dtype=dtype, device=second.device)
        first = second if first is None else first
        self.launch(first, second if second.numel() else first, added)
        return added


class GradientPass(LastGradientPass):
    """The gradient at the first value in the value's layout."""

    has_place_for_largest = True

    def __init__(
        self,
        value: Spec,
        tile: Tile,
        largest: Arithmetic | None,
        program: Any,
        norm: Normalize | None,
        want: reverse.Wanted,
        per_group: int,
    ) -> None:
        """`largest`: the arithmetic of the products that will want each channel's largest magnitude."""
        from postlude.kernels.triton import gradient as kernels

        batch, channels, positions = sizes_of(value)
        cut = last_cut(value, tile)
        chunks = cut.chunks(positions)
        super().__init__(value, want, chunks)
        constants: dict[str, Any] = {
            **what_is_computed(program, norm, want),
            "LARGEST": largest is not None,
            "FLAGS": largest is not None and largest.flags_infinities,
            **cut.constants(value),
            "ACC": accumulator(self.acc),
        }
        kernel = kernels.last_gradient_kernel if cut.block_c else kernels.row_gradient_kernel
        numbers = (channels, positions, chunks, per_group, batch * channels * chunks)
        self.launch = Launch(kernel, cut.grid(value), numbers, constants, _warps(cut, value))


def _plane(first: Tensor | None, second: Tensor, number: int) -> Tensor:
    """[N, C, CHUNKS], one of the sums of both passes."""
    before = 0 if first is None else len(first)
    return second[number - before] if first is None or number >= before else first[number]


def _tile(plan: Plan) -> Tile:
    """The plan's, with no more elements than registers last for."""
    tile, row = tile_of(plan), power_of_two(sizes_of(plan.value)[2])
    each = 4 if accumulator_of(plan.value) == torch.float64 else 1
    most, most_summed = _MOST // each, _MOST_SUMMED // each
    return dataclasses.replace(
        tile,
        block=min(tile.block, max(1, most // max(1, tile.block_c))),
        moments_block=min(tile.moments_block, max(1, most_summed // max(1, tile.block_c))),
        rows=min(tile.rows, most // row),
        moments_rows=min(tile.moments_rows, most_summed // row),
    )


def _warps(cut: Cut, value: Spec) -> int:
    if cut.is_short:  # a row's sums cost each warp five shuffles
        return cut.warps(value, _ROW_WARPS, 8 if accumulator_of(value) == torch.float64 else 16)
    return cut.warps(value, _LAST_WARPS if cut.block_c else _ROW_WARPS)
