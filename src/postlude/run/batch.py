"""batch_norm in training on a GPU: what the passes found per sample and channel, combined over the batch.

Both give one number per sample and channel, as for an instance_norm, the same for every sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Normalize
from postlude.plan.problem import Spec
from postlude.run.launch import Launch, accumulator
from postlude.run.passes import Partials, accumulator_of, adding, sizes_of

_MOST = 8192  # numbers that a program adds up at a time: a channel is one program


class CombineBatch:
    """Partial moments to one mean and one reciprocal deviation per channel; moves the running statistics."""

    def __init__(self, step: Normalize, value: Spec, chunks: int) -> None:
        from postlude.kernels.triton.batch import combine_batch_kernel

        batch, channels, positions = sizes_of(value)
        self.per_group, self.step = 1, step
        self.groups = batch * channels
        numbers = (batch, channels, chunks, float(batch * positions), step.eps)
        acc, (block, warps) = accumulator(accumulator_of(value)), adding(batch * chunks, _MOST)
        self.launch, self.move = (
            Launch(
                combine_batch_kernel,
                (channels,),
                numbers,
                {"MOMENTUM": step.momentum, "MOVES": moves, "BLOCK": block, "ACC": acc},
                warps,
            )
            for moves in (False, True)
        )

    def __call__(self, partials: Partials, tensors: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """With `tensors`, one per slot of the chain, the running statistics among them move."""
        both = torch.empty((2, self.groups), dtype=partials.means.dtype, device=partials.means.device)
        found = (partials.means, partials.squares, partials.counts, both[0], both[1])
        if tensors is None or self.step.running is None:
            self.launch(*found, both, both)
            return both[0], both[1]
        running = [tensors[slot.index] for slot in self.step.running]
        moved = [tensor.contiguous() for tensor in running]
        self.move(*found, *moved)
        for old, new in zip(running, moved):
            if new is not old:
                old.copy_(new)
        return both[0], both[1]


class CombineBatchSums:
    """The means over the batch of γ · dn and of γ · dn · x̂, per channel."""

    def __init__(self, value: Spec, chunks: int, has_weight: bool) -> None:
        from postlude.kernels.triton.batch import combine_batch_sums_kernel

        batch, channels, positions = sizes_of(value)
        self.shape = (2, batch * channels)
        numbers = (batch, channels, positions, chunks, batch * channels * chunks)
        block, warps = adding(batch * chunks, _MOST)
        constants = {"HAS_WEIGHT": has_weight, "BLOCK": block}
        self.launch = Launch(combine_batch_sums_kernel, (channels,), numbers, constants, warps)

    def __call__(self, sums: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        both = torch.empty(self.shape, dtype=sums.dtype, device=sums.device)
        a, b = both[0], both[1]
        self.launch(sums, sums if weight is None else weight, a, b)
        return a, b
