"""The backward pass of a chain that needs only moments, down to the convolution's result v (without bias).

The gradient at v is shift + slope · v per sample and channel. It is returned as a table [N, C, 4] in float32:
shift · 2^e, slope · 2^e, e and 0, where e brings every magnitude under 2¹⁵.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.moments import Moments
from postlude.plan import Plan
from postlude.plan.problem import Spec, power_of_two
from postlude.stages.cuts import Partials
from postlude.stages.moments import WARPS, blocks, closed_form
from postlude.stages.trace import Unread, launch

_TILE = 1024  # numbers per tile, in float64: 2048 spill
_LARGEST = 100  # |e| is at most this


def combined_moments(value: Spec, partials: Partials) -> Moments:
    """Combines partial moments with one launch."""
    batch, channels = value.shape[:2]
    both = torch.empty((2, batch, channels), dtype=torch.float64, device=partials.means.device)
    block_c, block = blocks(channels)
    launch(
        "moments_gradient",
        "combined_moments_kernel",
        (batch,),
        [*partials, both],
        (batch, partials.chunks),
        {"C": channels, "BLOCK_C": block_c, "BLOCK_PARTS": block},
        WARPS,
    )
    return Moments(both[0], both[1], math.prod(value.shape[2:]))


def moments_gradient(
    plan: Plan, moments: Moments, dy: Tensor, tensors: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[list[Tensor | None], Tensor]:
    """The gradient of every slot but the convolution's input and weight, and the table, by one launch."""
    found, conv = closed_form(plan.chain.steps), plan.chain.convolution
    assert found is not None
    assert moments.variance is not None
    norm, reduce = found
    batch, channels = plan.value.shape[:2]
    groups = norm.groups or channels
    table = torch.empty((batch, channels, 4), dtype=torch.float32, device=dy.device)
    slots = [None if slot is None else slot.index for slot in (norm.weight, norm.bias)]
    slots.append(2 if conv.has_bias else None)
    results = [None if slot is None else torch.empty_like(tensors[slot]) for slot in slots]
    gamma, bias = (None if slots[i] is None else tensors[slots[i] or 0].contiguous() for i in (0, 2))
    pointers = [Unread(table) if one is None else one for one in (gamma, bias, table, *results)]
    block_c = power_of_two(channels // groups)
    launch(
        "moments_gradient",
        "moments_gradient_kernel",
        (groups,),
        [moments.mean, moments.variance, dy.contiguous(), *pointers],
        (batch, moments.positions),
        {
            "C": channels,
            "C_PER_GROUP": channels // groups,
            "eps": norm.eps,
            "IS_OVER_SPACE": reduce.over == "space",
            "IS_SUM": reduce.op == "sum",
            "HAS_GAMMA": norm.weight is not None,
            "HAS_BETA": norm.bias is not None,
            "HAS_BIAS": conv.has_bias,
            "BLOCK_C": block_c,
            "BLOCK_SAMPLES": min(power_of_two(batch), _TILE // block_c),
        },
    )
    grads: list[Tensor | None] = [None] * len(tensors)
    for slot, gradient in zip(slots, results):
        if slot is not None and needs[slot]:
            grads[slot] = gradient
    return grads, table


def table_of(shift: Tensor, slope: Tensor, dmean: Tensor, moments: Moments) -> Tensor:
    """The same table from [N, C] float64, by PyTorch's operators. |v − mean| is at most √(variance · positions)."""
    assert moments.variance is not None
    spread = (moments.variance.clamp_min(0) * moments.positions).sqrt()
    bound = dmean.abs() / moments.positions + slope.abs() * spread
    power = (15 - torch.frexp(bound).exponent).clamp(-_LARGEST, _LARGEST)
    power = torch.where(bound == 0, _LARGEST, power)
    scaled = [torch.ldexp(shift, power), torch.ldexp(slope, power), power, torch.zeros_like(shift)]
    return torch.stack([part.float() for part in scaled], 2)
