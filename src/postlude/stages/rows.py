"""Passes by rows: layer_norm, and norms, softmax and reductions over a linear layer's features.

A tile holds whole rows, so all fused steps read and write the value once. Their gradients are one pass too, plus sums
over rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from postlude import reverse
from postlude.chain import Reduce
from postlude.plan import Plan
from postlude.plan.barriers import last_fused_step, row_parts
from postlude.plan.problem import Spec, memory_format, power_in, power_of_two
from postlude.stages.cuts import accumulator, accumulator_of, forward_steps, operands, result_like, steps_of
from postlude.stages.gradient import Gradients, add_channels, gradient_of_vector, without_unread
from postlude.stages.trace import Unread, launch

_TILE = 2048  # elements: a tile takes several short rows, up to this
_ELEMENTS = 32  # per thread, at most
_MOST_TILES = 16  # per program of the gradients: more tiles mean fewer partial sums
_PROGRAMS = 256  # least programs for a linear layer's gradients, if there are enough rows


def rows_pass(plan: Plan, value: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    chain, spec, last = plan.chain, plan.value, plan.passes[-1].last
    end, (length, in_channel, rows, cut) = reduced_in_rows(plan), rows_of(plan)
    if end is not None:
        shape = (rows, 1) if end.keepdim else (rows,)
        result = torch.empty(shape, dtype=getattr(torch, plan.result_dtype), device=value.device)
    else:
        result = result_like(plan, value, chain.producer is not None, turns=False)
    one_channel = not cut["IS_WHOLE_SAMPLE"] and in_channel % cut["BLOCK_ROWS"] == 0
    is_even = length == cut["BLOCK_L"] and rows % cut["BLOCK_ROWS"] == 0
    launch(
        "rows",
        "rows_kernel",
        (-(-rows // cut["BLOCK_ROWS"]),),
        [value, result, *operands(chain, last, spec, tensors, value, plan.resumes_at)],
        (spec.shape[1], in_channel, length, rows),
        {
            "ROW_STEPS_FN": forward_steps(chain, "rows", last, spec.shape[1], plan.resumes_at),
            **cut,
            "HAS_GROUPS": chain.is_linear and length < spec.shape[1],
            "IS_REDUCED": end is not None,
            "HAS_ONE_CHANNEL": one_channel,
            "IS_EVEN_ROWS": is_even,
            "ACC": accumulator(accumulator_of(spec)),
        },
        _warps(cut),
    )
    if chain.is_linear:
        return result
    # The result is contiguous, unless a step after the norm takes on another tensor's layout.
    layout = plan.result_layout if last == len(chain.steps) else spec.layout
    return result.contiguous(memory_format=memory_format(layout, chain.dims))


def reduced_in_rows(plan: Plan) -> Reduce | None:
    """The first reduction over features among the steps of the pass."""
    steps = plan.chain.steps[: plan.passes[-1].last]
    return next((step for step in steps if isinstance(step, Reduce)), None)


def rows_gradient(plan: Plan, needs: frozenset[int], value: Tensor, dy: Tensor, tensors: Sequence[Tensor]) -> Gradients:
    """The gradient at the first value, and the gradient of each slot in that slot's dtype."""
    chain, spec, last = plan.chain, plan.value, last_fused_step(plan.chain)
    wanted = reverse.wanted(chain, last, needs)
    function, acc = reverse.gradient(chain, last, needs, plan.gradients.from_result), accumulator_of(spec)
    value, dy = value.contiguous(), dy.to(getattr(torch, plan.result_dtype)).contiguous()
    read = without_unread(chain, tensors, value, function.loaded)
    cut = _gradient_cut(plan)
    # After a linear layer every vector has one number per position in a row.
    totals, columns = ((), wanted.totals) if chain.is_linear else (wanted.totals, ())
    norm_sums = _norm_sums(plan, needs)
    count = len(columns) + (2 if norm_sums else 0)
    first = torch.empty_like(value)
    sums = torch.empty((len(totals), *spec.shape[:2], cut.chunks), dtype=acc, device=value.device)
    added = torch.empty((count, *cut.columns, 1), dtype=acc, device=value.device)
    full = [torch.empty_like(value, dtype=tensors[slot].dtype) for slot in wanted.full]
    partial = [part if part.numel() else Unread(value) for part in (sums, added)]
    unread = [Unread(value)] * (reverse.MOST_FULL - len(full))
    launch(
        "rows",
        "rows_gradient_kernel",
        (cut.programs,),
        [value, dy, first, *partial, *full, *unread, *operands(chain, last, spec, read, value)],
        (spec.shape[1], cut.rows, cut.length, cut.chunks, cut.tiles, cut.programs),
        {
            "ROW_GRADIENT_FN": steps_of(function, spec.shape[1]),
            "NUM_SUMS": len(totals),
            "NUM_FULL": len(wanted.full),
            "NUM_COLUMN_SUMS": count,
            "HAS_GROUPS": chain.is_linear,
            "IS_REDUCED": reduced_in_rows(plan) is not None,
            **cut.constants,
            "ACC": accumulator(acc),
        },
        2 * _warps(cut.constants),
    )
    places = {slot: [place] for place, slot in enumerate(columns)}
    for slot, place in norm_sums.items():
        places.setdefault(slot, []).append(len(columns) + place)
    found = dict(zip(wanted.full, full))
    return first, found | _vectors(plan, {s: [n] for n, s in enumerate(totals)}, sums, places, added, tensors)


class GradientCut(NamedTuple):
    """How the rows of a gradient launch are divided into programs."""

    length: int
    rows: int  # that share the same part of γ and β: of a sample's channel, or after a linear layer of all samples
    tiles: int  # per program
    chunks: int
    programs: int
    columns: tuple[int, int]  # partial sums over rows, and the positions of each
    constants: dict[str, Any]


def _gradient_cut(plan: Plan) -> GradientCut:
    length, in_channel, rows, cut = rows_of(plan)
    batch, channels = plan.value.shape[:2]
    constants = {name: cut[name] for name in ("BLOCK_ROWS", "BLOCK_L", "ALIGN")}
    parts = row_parts(plan.chain) if plan.chain.is_linear else batch * channels
    same = batch if plan.chain.is_linear else in_channel
    constants["BLOCK_ROWS"] = block = min(cut["BLOCK_ROWS"], power_of_two(same))
    most = max(1, rows // (block * _PROGRAMS)) if plan.chain.is_linear else _MOST_TILES
    tiles = min(_MOST_TILES, most, -(-same // block))
    chunks = -(-same // (tiles * block))
    columns = (chunks, channels) if plan.chain.is_linear else (parts * chunks, length)
    return GradientCut(length, same, tiles, chunks, parts * chunks, columns, constants)


def _norm_sums(plan: Plan, needs: frozenset[int]) -> dict[int, int]:
    """The slots of β and γ whose gradients are needed, with their index among the norm's sums."""
    norm = plan.norm
    slots = [] if norm is None else [None if slot is None else slot.index for slot in (norm.bias, norm.weight)]
    return {slot: place for place, slot in enumerate(slots) if slot is not None and slot in needs}


def _vectors(
    plan: Plan,
    totals: dict[int, list[int]],
    sums: Tensor,
    rows: dict[int, list[int]],
    columns: Tensor,
    tensors: Sequence[Tensor],
) -> dict[int, Tensor]:
    """Gradients of the steps' vectors from `sums` [NUM_SUMS, N, C, CHUNKS], and of vectors with one number per position
    in a row from `columns` [NUM_COLUMN_SUMS, PARTS, PLACES, 1]. Slots map to their index in these."""
    found = {}
    for slot in [slot for slot in totals if plan.chain.roles[slot] == "row"]:
        (place,) = totals.pop(slot)
        total = sums[place].sum(-1, dtype=torch.float64)  # [N, C]
        found[slot] = total.to(tensors[slot].dtype).view(tensors[slot].shape)
    whole = Spec(tuple(columns.shape[1:]), plan.value.dtype, "contiguous")
    for part_spec, parts, places in ((plan.value, sums, totals), (whole, columns, rows)):
        if places:
            added = add_channels(part_spec, None, parts, [tensors[slot].dtype for slot in places])
            for slot, those in places.items():
                found[slot] = gradient_of_vector([added[place] for place in those], tensors[slot])
    return found


def rows_of(plan: Plan) -> tuple[int, int, int, dict[str, Any]]:
    """Elements per row, rows per channel of a sample, rows in all, and the constants of the tiles."""
    shape, norm = plan.value.shape, plan.norm
    if plan.chain.is_linear:
        return _cut(shape[1] // row_parts(plan.chain), shape[1], 1, shape)
    assert norm is not None
    length = math.prod(shape[-norm.axes :])
    is_sample = norm.axes == len(shape) - 1
    return _cut(length, math.prod(shape[1:]), 1 if is_sample else math.prod(shape[2:]) // length, shape)


def _cut(length: int, sample: int, in_channel: int, shape: tuple[int, ...]) -> tuple[int, int, int, dict[str, Any]]:
    block = power_of_two(length)
    constants = {
        "IS_WHOLE_SAMPLE": length == sample,
        "BLOCK_ROWS": max(1, _TILE // block),
        "BLOCK_L": block,
        "ALIGN": power_in(length, 16),
    }
    return length, in_channel, math.prod(shape) // length, constants


def _warps(constants: dict[str, Any]) -> int:
    elements: int = constants["BLOCK_ROWS"] * constants["BLOCK_L"]
    return max(4, elements // (32 * _ELEMENTS))
