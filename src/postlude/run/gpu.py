"""Plans on a GPU: PyTorch's convolution, then Triton passes over its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Chain, Normalize
from postlude.emit import OPERANDS, pass_slots
from postlude.plan import Plan
from postlude.plan.problem import memory_format
from postlude.plan.types import Moments as MomentsSink
from postlude.plan.types import Tile
from postlude.reference import continue_from, convolve
from postlude.run.moments import Moments, finish
from postlude.run.programs import program

_WARPS = 4  # 8 measured slower in both layouts (channels-last moments 0.15 ms against 0.10)


def execute(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device, whatever its pointers say
            return _execute(plan, tensors)
    return _execute(plan, tensors)


def _execute(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
    chain, tile = plan.chain, plan.tile
    assert tile is not None
    value = _first_value(plan, tensors)
    last = plan.passes[-1]
    if isinstance(last.sink, MomentsSink):
        means, squares, chunk = _partial_moments(plan, tile, value, tensors, last.last, last.sink.squares)
        moments = _per_channel(value, means, squares, chunk) if last.sink.squares else _mean_only(value, means)
        return finish(chain, moments, last.last + 1, getattr(torch, plan.result_dtype), tensors)
    result = _finished(plan, tile, value, tensors, last.last)
    return continue_from(chain, last.last, result, tensors)


def _first_value(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
    conv = plan.chain.producer
    layout = memory_format(plan.layout_inside, plan.chain.dims)
    if conv is None:
        return tensors[0].contiguous(memory_format=layout)
    dtype = None if conv.dtype is None else getattr(torch, conv.dtype)
    x, weight = (t if dtype is None else t.to(dtype) for t in tensors[:2])
    return convolve(conv, x, weight, None).contiguous(memory_format=layout)  # the program adds the bias


def _partial_moments(
    plan: Plan, tile: Tile, value: Tensor, tensors: Sequence[Tensor], last: int, squares_too: bool = True
) -> tuple[Tensor, Tensor, int]:
    """[N, C, CHUNKS] means (or sums) and sums of squared deviations, and the positions of a chunk."""
    from postlude.kernels.triton import normalize as kernels

    batch, channels, positions = _sizes(value)
    chunk = tile.block * tile.tiles
    chunks = -(-positions // chunk)
    acc = _accumulator(value)
    means = torch.empty(batch, channels, chunks, dtype=acc, device=value.device)
    squares = torch.empty_like(means)
    pointers = pass_slots(plan.chain, last)
    before = program(plan.chain, "before", last, pointers)
    operands = _operands(plan.chain, value, tensors, pointers)
    common = (value, means, squares, *operands, channels, positions, chunks)
    options: dict[str, Any] = {"BEFORE": before, "BLOCK": tile.block, "ACC": _triton(acc), "num_warps": _WARPS}
    options["SQUARES"] = squares_too
    if tile.block_c:
        grid = (batch * chunks, -(-channels // tile.block_c))
        kernels.last_moments_kernel[grid](
            *common, TILES=tile.tiles, BLOCK_C=tile.block_c, WIDE=_is_wide(value), **options
        )
    else:
        kernels.row_moments_kernel[(batch * channels * chunks,)](*common, TILES=tile.tiles, **options)
    return means, squares, chunk


def _finished(plan: Plan, tile: Tile, value: Tensor, tensors: Sequence[Tensor], last: int) -> Tensor:
    from postlude.kernels.triton import normalize as kernels

    chain = plan.chain
    batch, channels, positions = _sizes(value)
    step = next((s for s in chain.steps[:last] if isinstance(s, Normalize)), None)
    mean = rstd = value  # unread without a norm
    per_group = 1
    if step is not None:
        per_group = channels // (step.groups or channels)
        before = plan.passes[0].last
        mean, rstd = _group_moments(plan, tile, value, tensors, before, per_group, step.eps)
    dtype = getattr(torch, plan.result_dtype)
    owned = chain.producer is not None and value.dtype == dtype
    contiguous_out = bool(tile.block_c) and last == len(chain.steps) and plan.result_layout == "contiguous"
    if contiguous_out:
        result = torch.empty(value.shape, dtype=dtype, device=value.device)
    else:
        result = value if owned else torch.empty_like(value, dtype=dtype)
    pointers = pass_slots(chain, last)
    whole = program(chain, "whole", last, pointers)
    operands = _operands(chain, value, tensors, pointers)
    chunks = -(-positions // tile.block)
    common = (value, result, mean, rstd, *operands, channels, positions, chunks, per_group)
    options: dict[str, Any] = {
        "WHOLE": whole,
        "HAS_NORM": step is not None,
        "BLOCK": tile.block,
        "ACC": _triton(_accumulator(value)),
        "num_warps": _WARPS,
    }
    if tile.block_c:
        grid = (batch * chunks, -(-channels // tile.block_c))
        options.update(BLOCK_C=tile.block_c, WIDE=_is_wide(value), CONTIGUOUS_OUT=contiguous_out)
        kernels.last_finish_kernel[grid](*common, **options)
    else:
        kernels.row_finish_kernel[(batch * channels * chunks,)](*common, **options)
    return result


def _group_moments(
    plan: Plan, tile: Tile, value: Tensor, tensors: Sequence[Tensor], before: int, per_group: int, eps: float
) -> tuple[Tensor, Tensor]:
    from postlude.kernels.triton import normalize as kernels

    means, squares, chunk = _partial_moments(plan, tile, value, tensors, before)
    batch, channels, positions = _sizes(value)
    groups, chunks = batch * channels // per_group, means.shape[2]
    mean, rstd = means.new_empty(groups), means.new_empty(groups)
    kernels.combine_moments_kernel[(groups,)](
        means,
        squares,
        mean,
        rstd,
        per_group * chunks,
        chunks,
        chunk,
        positions,
        float(per_group * positions),
        eps,
        BLOCK=1024,
        ACC=_triton(means.dtype),
    )
    return mean, rstd


def _per_channel(value: Tensor, means: Tensor, squares: Tensor, chunk: int) -> Moments:
    """[N, C] moments in float64 from the chunks', by Chan's formula."""
    positions, chunks = _sizes(value)[2], means.shape[2]
    counts = torch.full((chunks,), chunk, dtype=torch.float64, device=value.device)
    counts[-1] = positions - chunk * (chunks - 1)
    means, squares = means.double(), squares.double()
    mean = (means * counts).sum(2) / positions
    total = squares.sum(2) + ((means - mean[..., None]).square() * counts).sum(2)
    return Moments(mean, total / positions, positions)


def _mean_only(value: Tensor, sums: Tensor) -> Moments:
    positions = _sizes(value)[2]
    return Moments(sums.double().sum(2) / positions, None, positions)


def _operands(chain: Chain, value: Tensor, tensors: Sequence[Tensor], pointers: tuple[int, ...]) -> list[Tensor]:
    layout = memory_format("contiguous" if value.is_contiguous() else "channels_last", chain.dims)
    found = [
        tensors[index].contiguous(memory_format=layout) if chain.roles[index] == "full" else tensors[index].contiguous()
        for index in pointers
    ]
    return found + [value] * (OPERANDS - len(found))  # what no step reads is never loaded


def _sizes(value: Tensor) -> tuple[int, int, int]:
    return value.shape[0], value.shape[1], math.prod(value.shape[2:])


def _accumulator(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def _triton(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def _is_wide(value: Tensor) -> bool:
    """True where offsets inside one sample need 64 bits."""
    return value.shape[1] * math.prod(value.shape[2:]) >= 1 << 31
