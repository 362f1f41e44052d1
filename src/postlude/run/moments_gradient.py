"""The backward pass of a chain that needs only moments, down to the convolution's result: the table of its gradient.

At the convolution's result v, without its bias, the gradient is shift + slope · v per sample and channel. The table has
[N, C, 4] float32: shift · 2^e, slope · 2^e, e and 0, with an e that brings every magnitude under 2¹⁵.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Cast, Chain, Normalize, Reduce
from postlude.plan import Plan
from postlude.plan.problem import Spec, power_of_two
from postlude.run.finish_moments import WARPS, blocks
from postlude.run.launch import Launch
from postlude.run.moments import Moments
from postlude.run.passes import Partials

TILE = 1024  # numbers of a tile, in float64: 2048 spill
_LARGEST = 100  # exponent of the scale, either way


def closed_form(chain: Chain) -> tuple[Normalize, Reduce] | None:
    """The norm of each sample and the reduction of a chain that has nothing else: one launch makes the table."""
    steps = [step for step in chain.steps if not isinstance(step, Cast)]
    if len(steps) != 2 or not isinstance(steps[0], Normalize) or not isinstance(steps[1], Reduce):
        return None
    return (steps[0], steps[1]) if steps[0].over == "sample" else None


class CombinedMoments:
    """Partial moments combined by one launch."""

    def __init__(self, value: Spec) -> None:
        self.shape, self.positions = value.shape[:2], math.prod(value.shape[2:])
        self.launch: Launch | None = None

    def __call__(self, partials: Partials) -> Moments:
        if self.launch is None:
            self.launch = self._prepare(partials.means.shape[2])
        both = torch.empty((2, *self.shape), dtype=torch.float64, device=partials.means.device)
        self.launch(partials.means, partials.squares, partials.counts, both)
        return Moments(both[0], both[1], self.positions)

    def _prepare(self, chunks: int) -> Launch:
        from postlude.kernels.triton.moments_gradient import combined_moments_kernel

        batch, channels = self.shape
        block_c, block = blocks(channels)
        constants = {"C": channels, "BLOCK_C": block_c, "BLOCK": block}
        return Launch(combined_moments_kernel, (batch,), (batch, chunks), constants, WARPS)


class MomentsGradient:
    """One launch from the result's gradient to those of the norm's tensors and of the bias, and to the table."""

    def __init__(self, plan: Plan) -> None:
        from postlude.kernels.triton.moments_gradient import moments_gradient_kernel

        found, conv = closed_form(plan.chain), plan.chain.producer
        assert found is not None
        assert conv is not None
        self.norm, reduce = found
        self.has_bias = conv.has_bias
        batch, channels = plan.value.shape[:2]
        groups = self.norm.groups or channels
        block_p = power_of_two(channels // groups)
        constants = {
            "C": channels,
            "PER": channels // groups,
            "EPS": self.norm.eps,
            "OVER_SPACE": reduce.over == "space",
            "IS_SUM": reduce.op == "sum",
            "HAS_GAMMA": self.norm.weight is not None,
            "HAS_BETA": self.norm.bias is not None,
            "HAS_BIAS": conv.has_bias,
            "BLOCK_P": block_p,
            "BLOCK_N": min(power_of_two(batch), TILE // block_p),
        }
        numbers = (batch, math.prod(plan.value.shape[2:]))
        self.shape = (batch, channels, 4)
        self.launch = Launch(moments_gradient_kernel, (groups,), numbers, constants)

    def __call__(
        self, tensors: Sequence[Tensor], moments: Moments, dy: Tensor, needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], Tensor]:
        """The gradient of every slot but the convolution's input and weight, and the table."""
        assert moments.variance is not None
        table = torch.empty(self.shape, dtype=torch.float32, device=dy.device)
        slots = [None if slot is None else slot.index for slot in (self.norm.weight, self.norm.bias)]
        slots.append(2 if self.has_bias else None)
        found = [table if slot is None else torch.empty_like(tensors[slot]) for slot in slots]
        gamma, bias = (table if slots[i] is None else tensors[slots[i] or 0].contiguous() for i in (0, 2))
        self.launch(moments.mean, moments.variance, dy.contiguous(), gamma, bias, table, *found)
        grads: list[Tensor | None] = [None] * len(tensors)
        for slot, gradient in zip(slots, found):
            if slot is not None and needs[slot]:
                grads[slot] = gradient
        return grads, table


def table_of(shift: Tensor, slope: Tensor, dmean: Tensor, moments: Moments) -> Tensor:
    """The same table from [N, C] float64, by PyTorch's operators. No |v − mean| is above √(variance · positions)."""
    assert moments.variance is not None
    spread = (moments.variance.clamp_min(0) * moments.positions).sqrt()
    bound = dmean.abs() / moments.positions + slope.abs() * spread
    power = (15 - torch.frexp(bound).exponent).clamp(-_LARGEST, _LARGEST)
    power = torch.where(bound == 0, _LARGEST, power)
    scaled = [torch.ldexp(shift, power), torch.ldexp(slope, power), power, torch.zeros_like(shift)]
    return torch.stack([part.float() for part in scaled], 2)
