"""The end of a chain that needs only moments, on a GPU: one launch from partial moments to the reduction's result."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Chain, Reduce
from postlude.plan.problem import Spec, power_of_two
from postlude.plan.program import takes_the_batch
from postlude.reference import continue_from
from postlude.run.launch import Launch
from postlude.run.moments import Moments, finish, laid_out
from postlude.run.passes import Partials
from postlude.run.programs import composed
from postlude.steps import OPERANDS, moments, pass_slots

_TILE = 2048  # partial moments of a tile: 4096 spill as float64
WARPS = 8


class FinishMoments:
    """Steps `first` to the end, from the partial moments of a value: one small launch, then what follows the reduction.

    Where that launch cannot (too many channels or tensors, or a norm over the batch, of which each of its programs sees
    one sample), PyTorch's operators do it.
    """

    def __init__(self, chain: Chain, first: int, squares: bool, value: Spec, chunks: int, dtype: torch.dtype) -> None:
        """`value` is what the moments are of, in the layout that PyTorch would have there."""
        from postlude.kernels.triton.moments import MOST_CHANNELS, finish_moments_kernel

        self.chain, self.first, self.squares, self.dtype = chain, first, squares, dtype
        self.last, reduce = _reduction(chain, first)
        batch, channels, self.positions = value.shape[0], value.shape[1], math.prod(value.shape[2:])
        self.slots = pass_slots(chain, self.last, first)
        self.shape = _shape(reduce, chain.dims, batch, channels)
        self.reduce, self.is_last = reduce, value.layout == "channels_last"
        self.launch = None
        if channels <= MOST_CHANNELS and len(self.slots) <= OPERANDS and not takes_the_batch(chain):
            block_c, block = blocks(channels)
            constants = {
                "C": channels,
                "MOMENTS": moments_program(chain, first, self.last),
                "SQUARES": squares,
                "OVER_SPACE": reduce.over == "space",
                "BLOCK_C": block_c,
                "BLOCK": block,
            }
            self.launch = Launch(finish_moments_kernel, (batch,), (chunks,), constants, WARPS)

    def __call__(self, partials: Partials, tensors: Sequence[Tensor]) -> Tensor:
        if self.launch is None:
            moments = self.combined(partials)
            return finish(self.chain, moments, self.first, self.dtype, tensors, self.is_last, moves=True)
        means = partials.means
        result = torch.empty(self.shape, dtype=self.dtype, device=means.device)
        operands = [tensors[index].contiguous() for index in self.slots] + [means] * (OPERANDS - len(self.slots))
        self.launch(means, partials.squares, partials.counts, result, *operands)
        result = laid_out(result, self.reduce, self.is_last)
        if self.last == len(self.chain.steps):
            return result
        return continue_from(self.chain, self.last, result, tensors)

    def combined(self, partials: Partials) -> Moments:
        """[N, C] moments in float64 from the chunks', by Chan's formula."""
        counts = partials.counts.double()[:, None]
        # What is written for a chunk of no positions is anything.
        means, squares = (part.double().where(counts > 0, 0.0) for part in (partials.means, partials.squares))
        if not self.squares:
            return Moments(means.sum(2) / self.positions, None, self.positions)
        mean = (means * counts).sum(2) / self.positions
        total = squares.sum(2) + ((means - mean[..., None]).square() * counts).sum(2)
        return Moments(mean, total / self.positions, self.positions)


def blocks(channels: int) -> tuple[int, int]:
    """The kernel's BLOCK_C and BLOCK."""
    block_c = max(16, power_of_two(channels))
    return block_c, _TILE // block_c


@functools.lru_cache(maxsize=1024)
def moments_program(chain: Chain, first: int, last: int) -> Any:
    return composed(moments(chain, first, last))


@functools.lru_cache(maxsize=1024)
def _reduction(chain: Chain, first: int) -> tuple[int, Reduce]:
    """The reduction that ends the need for moments, and its number."""
    steps = enumerate(chain.steps[first - 1 :], first)
    return next((number, step) for number, step in steps if isinstance(step, Reduce))


def _shape(step: Reduce, dims: int, batch: int, channels: int) -> tuple[int, ...]:
    kept = (batch, channels) if step.over == "space" else (batch,)
    return kept + (1,) * (dims + 2 - len(kept)) if step.keepdim else kept
