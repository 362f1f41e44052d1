"""The last pass of a chain with a softmax or a reduction over channels: it reads the value once and writes at most
once.

In training it saves a reduction's result and, for max and min, the channel that was chosen. The gradient passes have
tiles with all channels too, and begin by loading these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from postlude.chain import Scalar, Value
from postlude.derivatives import TAP, G
from postlude.expressions import Assign, Name, Term, call
from postlude.plan import Plan
from postlude.plan.channels import CHANNELS_WARPS, channels_kind, channels_tile, gradient_tile
from postlude.plan.passes import Tile
from postlude.plan.problem import Spec, power_in, reduced_shape
from postlude.plan.tiles import pass_warps
from postlude.reverse import kept_of_reduction
from postlude.stages.cuts import (
    Cut,
    accumulator,
    accumulator_of,
    is_wide,
    operands,
    result_like,
    sizes_of,
    steps_around,
)
from postlude.stages.normalize import per_group
from postlude.stages.trace import Unread, launch, or_unread
from postlude.steps import C

_EACH = 16  # elements per thread where a tile is small
_SPREAD = "[None, :]"  # broadcasts a number per channel over positions
_MOST_TILES = 16  # per program of the sums


class Kept(NamedTuple):
    """What training saves of a reduction over channels, [N, S] each: its result, and the channel that was chosen."""

    reduced: Tensor | None = None
    taps: Tensor | None = None


def channels_pass(
    plan: Plan, value: Tensor, moments: tuple[Tensor, Tensor] | None, tensors: Sequence[Tensor]
) -> tuple[Tensor, Kept]:
    """All remaining steps: those before the reduction over channels, the reduction, and those after it."""
    chain, spec, last, over = plan.chain, plan.value, plan.passes[-1].last, plan.over_channels
    assert over is not None
    batch, channels, positions = sizes_of(spec)
    end = plan.channels_end
    block, block_c = channels_tile(channels, positions)
    chunks, is_last = -(-positions // block), spec.layout == "channels_last"
    turns = end is None and plan.turns
    result, first = _result(plan, value, turns), plan.resumes_at
    mean, rstd = moments or (Unread(value), Unread(value))
    around = (last, last + 1) if over.reduce is None else (over.reduce - 1, over.reduce + 1)
    before, after = steps_around(plan, *around, _SPREAD)
    kept = _kept(plan, value)
    launch(
        "channels",
        "channels_kernel",
        (batch * chunks,),
        [
            *(value, result, or_unread(kept.reduced, value), or_unread(kept.taps, value), mean, rstd),
            *operands(chain, last, spec, tensors, value, first),
        ],
        (channels, positions, chunks, per_group(plan.norm, spec)),
        {
            "NORM_STEPS_FN": before,
            "AFTER_FN": after,
            "OP": "none" if end is None else channels_kind(end.op),
            "HAS_REDUCED": kept.reduced is not None,
            "HAS_TAPS": kept.taps is not None,
            "HAS_NORM": plan.norm is not None,
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
    return result, kept


def _kept(plan: Plan, value: Tensor) -> Kept:
    """Memory for what a reduction's gradient reads; its result is kept in the accumulator's dtype."""
    spec, wanted = plan.value, kept_of_reduction(plan.chain, plan.passes[-1].last) if plan.trains else ()
    result, taps = (
        torch.empty((spec.shape[0], *spec.shape[2:]), dtype=dtype, device=value.device) if is_kept else None
        for dtype, is_kept in ((accumulator_of(spec), set(wanted) - {TAP}), (torch.int16, TAP in wanted))
    )
    return Kept(result, taps)


def gradient_lines(plan: Plan, count: int) -> tuple[Assign, ...]:
    """The first lines of the gradient passes' functions after a reduction over channels. The steps have `count`
    tensors; the reduction's gradient and what was saved follow them."""
    over, spec = plan.over_channels, plan.value
    if over is None or over.reduce is None:
        return ()
    _, channels, positions = sizes_of(spec)
    numbers = [Scalar(channels), Scalar(positions), Scalar(spec.layout == "channels_last")]

    def loaded(pointer: int) -> Term:
        return call("of_positions", Name(f"a{pointer}"), Value(0), Name("base"), Name("o_x"), *numbers)

    targets: list[Term] = [G, *kept_of_reduction(plan.chain, over.last)]
    channel_count = Assign((C,), Scalar(float(channels)))
    return (channel_count, *(Assign((target,), loaded(count + number)) for number, target in enumerate(targets)))


def gradient_cuts(spec: Spec, tile: Tile) -> tuple[Cut, Cut]:
    """The cuts of the sums pass and of the last gradient pass for tiles with all channels. A program of the sums has as
    many elements as with other tiles."""
    _, channels, positions = sizes_of(spec)
    block, block_c = gradient_tile(channels, positions)
    elements = tile.tiles * tile.moments_block * max(1, tile.block_c, tile.moments_rows)
    tiles = max(1, min(_MOST_TILES, elements // (block * block_c), -(-positions // block)))
    is_contiguous = spec.layout != "channels_last"
    return Cut(block, block_c, is_contiguous, tiles), Cut(block, block_c, is_contiguous)


def _result(plan: Plan, value: Tensor, turns: bool) -> Tensor:
    if plan.channels_end is None:
        return result_like(plan, value, plan.chain.producer is not None, turns)
    shape = reduced_shape(plan.channels_end, plan.value.shape)
    return torch.empty(shape, dtype=getattr(torch, plan.result_dtype), device=value.device)
