"""A norm on the CPU: in the value's own memory where that is safe."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.chain import Normalize
from postlude.moments import channel_moments, statistics
from postlude.reference import NORMS


def normalized(x: Tensor, step: Normalize, tensors: Sequence[Tensor], overwrite: bool) -> Tensor:
    """The norm of `x`, written into `x` if `overwrite` allows it. A batch_norm updates its running statistics."""
    weight, bias = (None if slot is None else tensors[slot.index] for slot in (step.weight, step.bias))
    if step.over != "sample":
        running = [tensors[slot.index] for slot in step.running] if step.running is not None else [None, None]
        dtypes = {tensor.dtype for tensor in (x, weight, bias, *running) if tensor is not None}
        if step.over == "batch" and overwrite and dtypes == {torch.float32}:
            return _batch_norm_in_place(x, step, weight, bias, *running)
        return NORMS[step.op](x, step, weight, bias, *running)
    groups = step.groups or x.shape[1]
    if step.groups is None:
        # instance_norm as group_norm with one group per channel, which PyTorch runs several times faster. The result
        # must be contiguous, as instance_norm's is; and group_norm's channels-last kernel loses digits to cancellation.
        x = x.contiguous()
    if x.is_contiguous():
        # With one channel or one position both layouts match. Canonical strides keep PyTorch from that kernel.
        x = x.view(-1).view(x.shape)
    if overwrite and x.dtype == torch.float32 and x.is_contiguous():
        return _in_place(x, step, weight, bias)
    return F.group_norm(x, groups, weight, bias, step.eps)


def _in_place(x: Tensor, step: Normalize, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm in place. This saves a second buffer and its page faults, which are half of eager's time on large
    values."""
    batch, channels = x.shape[:2]
    moments, centre = channel_moments(x, squares=True, overwrite=True)
    middle, spread = statistics(moments, step)
    scale = torch.rsqrt(spread + step.eps)  # [N, C]
    if weight is not None:
        scale = scale * weight.double()
    shift = (centre - middle) * scale
    if bias is not None:
        shift = shift + bias.double()
    rows = x.view(1, batch * channels, math.prod(x.shape[2:]))
    zeros, ones = torch.zeros(batch * channels), torch.ones(batch * channels)
    # batch_norm in evaluation is x·scale + shift per row, in one pass, and its `out` may be its input.
    _scale_and_shift(rows, scale.flatten().float(), shift.flatten().float(), zeros, ones, 0.0)
    return x


def _batch_norm_in_place(
    x: Tensor,
    step: Normalize,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
) -> Tensor:
    """PyTorch's batch statistics, which update the running ones, then its batch_norm in evaluation with them."""
    mean, variance = torch.batch_norm_update_stats(x, running_mean, running_var, step.momentum)
    _scale_and_shift(x, weight, bias, mean, variance, step.eps)
    return x


def _scale_and_shift(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> None:
    unused = torch.empty(0)
    torch.ops.aten.native_batch_norm.out(
        *(x, weight, bias, mean, variance, False, 0.0, eps), out=x, save_mean=unused, save_invstd=unused
    )
