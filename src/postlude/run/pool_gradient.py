"""max_pool3d whose gradient is a gather: an operator that replaces PyTorch's in a graph.

Compilers call PyTorch's kernel for the gradient of max_pool3d. It clears a contiguous tensor of the input's size, then
adds to it with atomics, and converts channels-last gradients and indices before. Where windows do not overlap, a
position belongs to one window at most and has that window's gradient if it is the largest there. This operator says so
in PyTorch's operators, which a compiler fuses with their neighbours. The forward pass is PyTorch's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.run.operator import LIBRARY

LIBRARY.define("max_pool3d(Tensor x, int[] kernel) -> Tensor")


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: list[int]) -> Tensor:
        result, places = torch.ops.aten.max_pool3d_with_indices(x, kernel, kernel)
        ctx.kernel, ctx.space = kernel, x.shape[2:]
        ctx.save_for_backward(places)
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        largest, found = (_of_positions(value, ctx.kernel) for value in (places, dy))
        covered = largest.shape[2:]
        dx = torch.where(largest == _numbers(covered, ctx.space, dy.device), found, 0.0)
        left = [size - end for size, end in zip(ctx.space, covered)]  # positions after the last window
        return F.pad(dx, [n for size in reversed(left) for n in (0, size)]) if any(left) else dx, None


def _of_positions(windows: Tensor, kernel: list[int]) -> Tensor:
    """[N, C, windows…] as [N, C, positions…]: what each position's window has."""
    batch, channels, *counts = windows.shape
    axes = [size for pair in zip(counts, kernel) for size in pair]
    apart = windows[:, :, :, None, :, None, :, None].expand(batch, channels, *axes)
    return apart.reshape(batch, channels, *(count * size for count, size in zip(counts, kernel)))


def _numbers(covered: torch.Size, space: torch.Size, device: torch.device) -> Tensor:
    """The number of each position that a window covers, in a contiguous value: what PyTorch's indices are."""
    first, second, third = (
        torch.arange(size, device=device) * math.prod(space[axis + 1 :]) for axis, size in enumerate(covered)
    )
    return first[:, None, None] + second[:, None] + third


LIBRARY.impl("max_pool3d", _MaxPool.apply, "CompositeImplicitAutograd")
