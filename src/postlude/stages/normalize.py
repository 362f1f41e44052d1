"""Passes over a value in memory: its moments, their combination, and one pass that computes all steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Normalize
from postlude.plan import Plan
from postlude.plan.passes import KeepMoments
from postlude.plan.problem import Spec
from postlude.stages.cuts import (
    Partials,
    accumulator,
    accumulator_of,
    adding,
    forward_steps,
    last_cut,
    moments_cut,
    operands,
    result_like,
    sizes_of,
    tile_of,
)
from postlude.stages.trace import Unread, launch

_WARPS = 4
_LAST_FINISH_WARPS = 8  # channels-last tiles of the last pass are four times as large
# Elements of short rows per thread of the moments pass. Many, so that few warps share a row: each of them costs the
# sums over the row five shuffles. Float64 has no registers for so many.
_SUMMED = {torch.float32: 32, torch.float64: 8}


def moments_pass(plan: Plan, value: Tensor, tensors: Sequence[Tensor]) -> Partials:
    spec, cut, first, acc = (
        plan.value,
        moments_cut(plan.value, tile_of(plan)),
        plan.resumes_at,
        accumulator_of(plan.value),
    )
    item = next(one for one in plan.passes if isinstance(one.sink, KeepMoments))
    assert isinstance(item.sink, KeepMoments)
    batch, channels, positions = sizes_of(spec)
    chunks = cut.chunks(positions)
    means = torch.empty((batch, channels, chunks), dtype=acc, device=value.device)
    squares = torch.empty_like(means)
    counts = torch.empty((batch, chunks), dtype=acc, device=value.device)
    launch(
        "normalize",
        "moments_kernel",
        cut.grid(spec),
        [value, means, squares, counts, *operands(plan.chain, item.last, spec, tensors, value, first)],
        (channels, positions, chunks, cut.tiles),
        {
            "STEPS_FN": forward_steps(plan.chain, "before", item.last, channels, first),
            "HAS_M2": item.sink.squares,
            **cut.constants(spec),
            "ACC": accumulator(acc),
        },
        cut.warps(spec, _WARPS, _SUMMED[acc] if cut.is_short else 8),
    )
    return Partials(means, squares, counts)


def per_group(step: Normalize | None, value: Spec) -> int:
    """Channels per group as the passes count them; 1 for batch_norm, which has one number per sample and channel."""
    return 1 if step is None or step.over == "batch" else value.shape[1] // (step.groups or value.shape[1])


def combine_moments(step: Normalize, value: Spec, partials: Partials) -> tuple[Tensor, Tensor]:
    """From partial moments to one mean and one rstd per sample and group."""
    batch, channels, positions = sizes_of(value)
    groups, each = step.groups or channels, per_group(step, value)
    means = partials.means
    mean, rstd = (torch.empty(batch * groups, dtype=means.dtype, device=means.device) for _ in range(2))
    block, warps = adding(each * partials.chunks)
    launch(
        "normalize",
        "combine_moments_kernel",
        (batch * groups,),
        [*partials, mean, rstd],
        (groups, each * partials.chunks, partials.chunks, float(each * positions), step.eps),
        {"BLOCK_PARTS": block, "ACC": accumulator(accumulator_of(value))},
        warps,
    )
    return mean, rstd


def finish_pass(plan: Plan, value: Tensor, moments: tuple[Tensor, Tensor] | None, tensors: Sequence[Tensor]) -> Tensor:
    """All remaining fused steps in one pass, which reads and writes the value once."""
    chain, spec, last = plan.chain, plan.value, plan.passes[-1].last
    cut, is_last = last_cut(spec, tile_of(plan)), bool(tile_of(plan).block_c)
    _, channels, positions = sizes_of(spec)
    result = result_like(plan, value, chain.producer is not None, plan.turns)
    mean, rstd = moments or (Unread(value), Unread(value))
    launch(
        "normalize",
        "finish_kernel",
        cut.grid(spec),
        [value, result, mean, rstd, *operands(chain, last, spec, tensors, value, plan.resumes_at)],
        (channels, positions, cut.chunks(positions), per_group(plan.norm, spec)),
        {
            "NORM_STEPS_FN": forward_steps(chain, "whole", last, channels, plan.resumes_at),
            "HAS_NORM": plan.norm is not None,
            **cut.constants(spec),
            "IS_OUT_CONTIGUOUS": plan.turns,
            "ACC": accumulator(accumulator_of(spec)),
        },
        cut.warps(spec, _LAST_FINISH_WARPS if is_last else _WARPS),
    )
    return result
