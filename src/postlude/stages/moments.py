"""The end of a chain that needs only moments: one launch computes the reduction's result from partial moments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Cast, Chain, Normalize, Reduce, Step
from postlude.moments import Moments, finish, laid_out
from postlude.plan.barriers import takes_the_batch
from postlude.plan.problem import Spec, power_of_two, reduced_shape
from postlude.reference import continue_from
from postlude.stages.cuts import Partials, steps_of
from postlude.stages.trace import Pointer, Unread, launch, launch_cuda
from postlude.steps import OPERANDS, moments, pass_slots

_TILE = 2048  # partial moments per tile: 4096 spill in float64
WARPS = 8


def finish_moments(
    chain: Chain,
    first: int,
    squares: bool,
    value: Spec,
    dtype: torch.dtype,
    partials: Partials,
    tensors: Sequence[Tensor],
    by_cuda: bool = False,
) -> Tensor:
    """Steps `first` to the end, from the partial moments of `value`: one small launch, then what follows the reduction.

    PyTorch's operators do it where the kernel cannot: with too many channels or tensors, or with a norm over the batch,
    because a program sees only one sample. The result has the layout that PyTorch's would have. `by_cuda`: use the CUDA
    C++ kernel for a norm and the mean of everything, because the moments came from CUDA C++ as well.
    """
    from postlude.kernels.triton.moments import MOST_CHANNELS

    steps = enumerate(chain.steps[first - 1 :], first)
    last, reduce = next((number, step) for number, step in steps if isinstance(step, Reduce))
    is_last = value.layout == "channels_last"
    slots = pass_slots(chain, last, first)
    if value.shape[1] > MOST_CHANNELS or len(slots) > OPERANDS or takes_the_batch(chain):
        whole = combined_by_pytorch(value, squares, partials)
        return finish(chain, whole, first, dtype, tensors, is_last, moves=True)
    result = torch.empty(reduced_shape(reduce, value.shape), dtype=dtype, device=partials.means.device)
    if not (by_cuda and _norm_and_mean(chain.steps[first - 1 : last], partials, tensors, result)):
        _by_triton(chain, (first, last), squares, reduce, partials, [tensors[index] for index in slots], result)
    result = laid_out(result, reduce, is_last)
    return result if last == len(chain.steps) else continue_from(chain, last, result, tensors)


def _by_triton(
    chain: Chain,
    steps: tuple[int, int],
    squares: bool,
    reduce: Reduce,
    partials: Partials,
    given: Sequence[Tensor],
    result: Tensor,
) -> None:
    batch, channels, _ = partials.means.shape
    read: list[Pointer] = [tensor.contiguous() for tensor in given]
    read += [Unread(partials.means)] * (OPERANDS - len(given))
    block_c, block = blocks(channels)
    launch(
        "moments",
        "finish_moments_kernel",
        (batch,),
        [*partials, result, *read],
        (partials.chunks,),
        {
            "C": channels,
            "MOMENTS_FN": steps_of(moments(chain, *steps)),
            "HAS_M2": squares,
            "IS_OVER_SPACE": reduce.over == "space",
            "BLOCK_C": block_c,
            "BLOCK_PARTS": block,
        },
        WARPS,
    )


def closed_form(steps: Sequence[Step]) -> tuple[Normalize, Reduce] | None:
    """The norm and the reduction, if the steps are nothing else: forward and backward have a kernel for that case."""
    steps = [step for step in steps if not isinstance(step, Cast)]
    if len(steps) != 2 or not isinstance(steps[0], Normalize) or not isinstance(steps[1], Reduce):
        return None
    return (steps[0], steps[1]) if steps[0].over == "sample" else None


def _norm_and_mean(steps: Sequence[Step], partials: Partials, tensors: Sequence[Tensor], result: Tensor) -> bool:
    """Launches few_channels_finish.cu if it can compute these steps; returns whether it did."""
    found = closed_form(steps)
    if found is None or (found[1].op, found[1].over) != ("mean", "sample"):
        return False
    norm, (batch, channels, tiles) = found[0], partials.means.shape
    if norm.weight is None or norm.bias is None or channels > 32:
        return False
    gamma, beta = tensors[norm.weight.index], tensors[norm.bias.index]
    if any(tensor.dtype != torch.float32 for tensor in (gamma, beta, result)):
        return False
    launch_cuda(
        "few_channels_finish.cu",
        "few_channels_finish",
        {"C_OUT": channels, "C_PER_GROUP": channels // (norm.groups or channels), "TILES": tiles, "EPS": norm.eps},
        (batch, 1),
        32,
        {
            "means": partials.means,
            "squares": partials.squares,
            "counts": partials.counts,
            "gamma": gamma.contiguous(),
            "beta": beta.contiguous(),
            "result": result,
        },
    )
    return True


def combined_by_pytorch(value: Spec, squares: bool, partials: Partials) -> Moments:
    """The moments [N, C] in float64 from those of the chunks, by Chan's formula."""
    positions, counts = math.prod(value.shape[2:]), partials.counts.double()[:, None]
    # The moments of an empty chunk are arbitrary.
    means, deviations = (part.double().where(counts > 0, 0.0) for part in partials[:2])
    if not squares:
        return Moments(means.sum(2) / positions, None, positions)
    mean = (means * counts).sum(2) / positions
    total = deviations.sum(2) + ((means - mean[..., None]).square() * counts).sum(2)
    return Moments(mean, total / positions, positions)


def blocks(channels: int) -> tuple[int, int]:
    """The kernel's BLOCK_C and BLOCK_PARTS."""
    block_c = max(16, power_of_two(channels))
    return block_c, _TILE // block_c
