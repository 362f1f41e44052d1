"""The gradients of a plan's fused steps: a pass for the sums that the norm's gradient needs, then one for all
gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from postlude import reverse
from postlude.chain import Chain, Normalize
from postlude.expressions import Function
from postlude.plan import Plan
from postlude.plan.passes import Tile
from postlude.plan.problem import Spec, memory_format, power_of_two
from postlude.plan.tiles import pass_warps
from postlude.plan.trained import last_with_gradient
from postlude.stages.batch import combine_batch_sums
from postlude.stages.channels import Kept, gradient_cuts, gradient_lines
from postlude.stages.cuts import (
    Cut,
    accumulator,
    accumulator_of,
    adding,
    last_cut,
    moments_cut,
    operands,
    sizes_of,
    steps_of,
    tile_of,
)
from postlude.stages.normalize import per_group
from postlude.stages.pack import Packing
from postlude.stages.pack_gradient import LastPass, packed_gradient
from postlude.stages.pools import unpooling_lines
from postlude.stages.trace import Pointer, Unread, launch, or_unread
from postlude.steps import pass_slots

# Most elements of a tile, a quarter of it in float64: each takes registers for two values and, in the first pass, sums.
# On an H200, channels-last in fp16: the last pass over (2, 32, 128³) 0.194 ms with 2048 and 4 warps, 0.213 with 4096
# and 8; over (64, 256, 56²) the sums 0.120 and 0.132, over (1, 32, 160², 128) 0.129 and 0.136.
_MOST = _MOST_SUMMED = 2048
_WARPS = 4
_MOST_WARPS = 8  # of a tile with all channels, which may have more elements
Gradients = tuple[Tensor, dict[int, Tensor]]  # at the first value (packed, if so asked for), and by slot


def gradient_passes(
    plan: Plan,
    needs: frozenset[int],
    value: Tensor,
    moments: tuple[Tensor, Tensor] | None,
    dy: Tensor,
    tensors: Sequence[Tensor],
    packing: Packing | None = None,
    largest: Tensor | None = None,
    taps: Tensor | None = None,
    kept: Kept = Kept(),  # noqa: B008  a value
) -> Gradients:
    """The gradient at the first value, from which the convolution's follow, and those of the slots `needs`.

    `value` is the convolution's result without its bias, or the input, or the chain's result if the plan says so;
    `moments` are the norm's mean and rstd; dy is the gradient of the last fused step's value, with a pool that of the
    pooled value. With `packing` the gradient at the first value is written packed. `largest`, zeros as from
    `none_found`, receives the largest magnitude of each of its channels. `taps` are max_pool's; `kept` is what the
    forward pass saved of a reduction over channels.
    """
    chain, spec, last = plan.chain, plan.value, last_with_gradient(plan.chain)
    wanted, layout = reverse.wanted(chain, last, needs), memory_format(spec.layout, chain.dims)
    norm = plan.norm
    value = value.contiguous(memory_format=layout)
    count = len(pass_slots(chain, last))
    given = (*unpooling_lines(plan, count), *gradient_lines(plan, count))
    form = torch.contiguous_format if plan.channels_end is not None else layout
    dy = dy.to(getattr(torch, plan.result_dtype)).contiguous(memory_format=form)
    function = reverse.gradient(chain, last, needs, plan.gradients.from_result, given)
    before = None if norm is None else reverse.sums(chain, last, needs, given)
    loaded = function.loaded | (frozenset() if before is None else before.loaded)
    behind = [dy, *(one for one in (taps, *kept) if one is not None)]
    g, read = _read(plan, last, value, behind, without_unread(chain, tensors, value, loaded))
    means: tuple[Pointer, Pointer] = moments or (Unread(value), Unread(value))
    sums, group_means = None, means
    if norm is not None and before is not None:
        sums = _sums_pass(plan, before, 2 + len(wanted.sums), norm, value, g, means, read)
        group_means = _combined(norm, spec, sums, tensors)
    steps, dtypes = steps_of(function, spec.shape[1]), [tensors[slot].dtype for slot in wanted.full]
    last_pass = LastPass(
        spec, norm, wanted, steps, per_group(norm, spec), value, g, (*means, *group_means), read, dtypes
    )
    made = _gradient_pass(plan, last_pass, largest) if packing is None else packed_gradient(last_pass, packing)
    dv, totals, full = made
    vectors = _vectors(chain, spec, places_of(norm, wanted, needs), sums, totals, tensors)
    return dv, {**dict(zip(wanted.full, full)), **vectors}


def _read(
    plan: Plan, last: int, value: Tensor, behind: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[Pointer, list[Pointer]]:
    """The gradient that the kernels load, and the steps' tensors. After a pool or a reduction the steps load the
    gradient themselves, with what was saved for it."""
    chain = plan.chain
    read = operands(chain, last, plan.value, tensors, value)
    if plan.pool is None and plan.channels_end is None:
        return behind[0], read
    count = len(pass_slots(chain, last))
    return Unread(value), [*read[:count], *behind, *read[count + len(behind) :]]


def _cuts(plan: Plan) -> tuple[Cut, Cut]:
    """The cuts of the sums pass and of the last pass."""
    tile = _tile(plan)
    if plan.over_channels is not None:
        return gradient_cuts(plan.value, tile)
    return moments_cut(plan.value, tile), last_cut(plan.value, tile)


def without_unread(chain: Chain, tensors: Sequence[Tensor], value: Tensor, loaded: Collection[int]) -> list[Tensor]:
    """Leaves out tensors that no gradient reads. Usually a residual's gradient does not depend on the residual."""
    return [
        value if chain.roles[slot] == "full" and slot not in loaded else tensor for slot, tensor in enumerate(tensors)
    ]


def places_of(norm: Normalize | None, wanted: reverse.Wanted, needs: frozenset[int]) -> dict[int, list[int]]:
    """Slots of vectors that need a gradient, and the sums that make it: the norm's, a step's, or both."""
    slots: list[int | None] = []
    if norm is not None:
        slots += [None if slot is None else slot.index for slot in (norm.bias, norm.weight)] + list(wanted.sums)
    slots += wanted.totals
    found: dict[int, list[int]] = {}
    for place, slot in enumerate(slots):
        if slot is not None and slot in needs:
            found.setdefault(slot, []).append(place)
    return found


def _vectors(
    chain: Chain,
    value: Spec,
    places: dict[int, list[int]],
    sums: Tensor | None,
    totals: Tensor,
    tensors: Sequence[Tensor],
) -> dict[int, Tensor]:
    per_sample = {slot: rows for slot, rows in places.items() if chain.roles[slot] == "row"}
    vectors = {slot: rows for slot, rows in places.items() if slot not in per_sample}
    found = {}
    if vectors:
        added = add_channels(value, sums, totals, [tensors[slot].dtype for slot in vectors])
        for slot, rows in vectors.items():
            found[slot] = gradient_of_vector([added[row] for row in rows], tensors[slot])
    before = 0 if sums is None else len(sums)
    for slot, rows in per_sample.items():
        planes = [totals[row - before] if sums is None or row >= before else sums[row] for row in rows]
        total = functools.reduce(torch.add, [plane.sum(-1, dtype=torch.float64) for plane in planes])  # [N, C]
        found[slot] = total.to(tensors[slot].dtype).view(tensors[slot].shape)
    return found


def gradient_of_vector(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    total = functools.reduce(torch.add, parts)
    total = total.sum() if like.numel() == 1 else total  # one number for all channels
    return total.to(like.dtype).view(like.shape)


def _sums_pass(
    plan: Plan,
    function: Function,
    count: int,
    norm: Normalize,
    value: Tensor,
    dy: Pointer,
    means: tuple[Pointer, Pointer],
    read: list[Pointer],
) -> Tensor:
    """Sums per sample, channel and chunk: of dn, of dn · x̂, and of the gradients of vectors after the norm."""
    spec, acc = plan.value, accumulator_of(plan.value)
    batch, channels, positions = sizes_of(spec)
    cut, _ = _cuts(plan)
    chunks = cut.chunks(positions)
    sums = torch.empty((count, batch, channels, chunks), dtype=acc, device=value.device)
    launch(
        "gradient",
        "sums_kernel",
        cut.grid(spec),
        [value, dy, *means, sums, *read],
        (channels, positions, chunks, cut.tiles, per_group(norm, spec), batch * channels * chunks),
        {"SUMS_FN": steps_of(function, channels), "NUM_SUMS": count, **cut.constants(spec), "ACC": accumulator(acc)},
        _warps(plan, cut),
    )
    return sums


def _combined(norm: Normalize, value: Spec, sums: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    weight = None if norm.weight is None else tensors[norm.weight.index].contiguous()
    if norm.over == "batch":
        return combine_batch_sums(value, sums, weight)
    return _combine_sums(norm, value, sums, weight)


def _combine_sums(norm: Normalize, value: Spec, sums: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The means over a group of γ · dn and of γ · dn · x̂."""
    batch, channels, positions = sizes_of(value)
    each, chunks = per_group(norm, value), sums.shape[-1]
    groups = channels // each
    a, b = (torch.empty(batch * groups, dtype=sums.dtype, device=sums.device) for _ in range(2))
    block, warps = adding(each * chunks, most=1024)
    launch(
        "gradient",
        "combine_sums_kernel",
        (batch * groups,),
        [sums, Unread(sums) if weight is None else weight, a, b],
        (groups, each, positions, chunks, batch * channels * chunks),
        {"HAS_GAMMA": weight is not None, "BLOCK_PARTS": block},
        warps,
    )
    return a, b


def _gradient_pass(plan: Plan, last: LastPass, largest: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The last pass, with the gradient at the first value in the value's layout."""
    spec, arithmetic = plan.value, plan.gradients.largest_found
    batch, channels, positions = sizes_of(spec)
    _, cut = _cuts(plan)
    chunks = cut.chunks(positions)
    is_read = plan.channels_end is None or reverse.needs_first_value(plan.chain, last_with_gradient(plan.chain))
    first = torch.empty_like(last.value) if is_read else last.value  # memory of that size, and no more
    sums, full, arguments = last.arguments(first, chunks)
    launch(
        "gradient",
        "gradient_kernel",
        cut.grid(spec),
        [*arguments, or_unread(largest, last.value), *last.read],
        (channels, positions, chunks, last.per_group, batch * channels * chunks),
        {
            **last.constants,
            "HAS_LARGEST": arithmetic is not None,
            "FLAGS_INF": arithmetic is not None and arithmetic.flags_infinities,
            **cut.constants(spec),
            "ACC": accumulator(accumulator_of(spec)),
        },
        _warps(plan, cut),
    )
    return first, sums, full


def add_channels(value: Spec, first: Tensor | None, second: Tensor, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Adds the sums [NUM_SUMS, N, C, CHUNKS] of both passes over samples and chunks, in one launch.

    The result's dtype is wide enough for all of `dtypes`.
    """
    batch, channels, _ = sizes_of(value)
    rows, chunks = (0, 1) if first is None else (first.shape[0], first.shape[3])
    dtype = functools.reduce(torch.promote_types, dtypes)
    added = torch.empty((rows + second.shape[0], channels), dtype=dtype, device=second.device)
    block, warps = adding(batch * max(chunks, second.shape[3]))
    filler = second if first is None else first  # of the same dtype: the kernel chooses between the two
    launch(
        "gradient",
        "add_channels_kernel",
        tuple(added.shape),
        [or_unread(first, second), or_unread(second if second.numel() else None, filler), added],
        (batch, channels, chunks, second.shape[3], rows),
        {"BLOCK_PARTS": block},
        warps,
    )
    return added


def _tile(plan: Plan) -> Tile:
    """The plan's tile, reduced to what fits in registers."""
    tile, row = tile_of(plan), power_of_two(sizes_of(plan.value)[2])
    each = 4 if accumulator_of(plan.value) == torch.float64 else 1
    # Each element loads the gradient and the tap of every window that contains it: otherwise 210 registers per thread.
    each *= 1 if plan.pool is None else power_of_two(math.prod(plan.pool.pool.windows.of_one_position()))
    most, most_summed = _MOST // each, _MOST_SUMMED // each
    return dataclasses.replace(
        tile,
        block=min(tile.block, max(1, most // max(1, tile.block_c))),
        moments_block=min(tile.moments_block, max(1, most_summed // max(1, tile.block_c))),
        rows=min(tile.rows, most // row),
        moments_rows=min(tile.moments_rows, most_summed // row),
    )


def _warps(plan: Plan, cut: Cut) -> int:
    value = plan.value
    if plan.over_channels is not None:
        return pass_warps(cut.block * cut.block_c, _MOST_WARPS, 16)
    if cut.is_short:  # a row's sums cost each warp five shuffles
        return cut.warps(value, _WARPS, 8 if accumulator_of(value) == torch.float64 else 16)
    return cut.warps(value, _WARPS)
