"""batch_norm in training: combines over the batch what the passes computed per sample and channel.

Both functions return one number per sample and channel, as instance_norm has, which is equal for all samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Normalize
from postlude.plan.problem import Spec
from postlude.stages.cuts import Partials, accumulator, accumulator_of, adding, sizes_of
from postlude.stages.trace import Unread, launch

_MOST = 8192  # numbers that a program loads at a time; a program has one channel


def combine_batch(
    step: Normalize, value: Spec, partials: Partials, tensors: Sequence[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """From partial moments to one mean and one rstd per channel.

    With `tensors`, one per slot of the chain, the running statistics among them are updated.
    """
    batch, channels, positions = sizes_of(value)
    means = partials.means
    mean, rstd = (torch.empty(batch * channels, dtype=means.dtype, device=means.device) for _ in range(2))
    running = [tensors[slot.index] for slot in step.running or ()] if tensors is not None else []
    moved = [tensor.contiguous() for tensor in running]
    block, warps = adding(batch * partials.chunks, _MOST)
    launch(
        "batch",
        "combine_batch_kernel",
        (channels,),
        [*partials, mean, rstd, *(moved or (Unread(mean), Unread(mean)))],
        (batch, channels, partials.chunks, float(batch * positions), step.eps),
        {
            "momentum": step.momentum,
            "HAS_RUNNING_STATS": bool(moved),
            "BLOCK_PARTS": block,
            "ACC": accumulator(accumulator_of(value)),
        },
        warps,
    )
    for old, new in zip(running, moved):
        if new is not old:
            old.copy_(new)
    return mean, rstd


def combine_batch_sums(value: Spec, sums: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The means over the batch of γ · dn and of γ · dn · x̂, per channel."""
    batch, channels, positions = sizes_of(value)
    chunks = sums.shape[-1]
    a, b = (torch.empty(batch * channels, dtype=sums.dtype, device=sums.device) for _ in range(2))
    block, warps = adding(batch * chunks, _MOST)
    launch(
        "batch",
        "combine_batch_sums_kernel",
        (channels,),
        [sums, Unread(sums) if weight is None else weight, a, b],
        (batch, channels, positions, chunks, batch * channels * chunks),
        {"HAS_GAMMA": weight is not None, "BLOCK_PARTS": block},
        warps,
    )
    return a, b
