"""Training of chains that need only a convolution's moments.

The chain's result is a function of each sample's and channel's mean and variance, of a few numbers each; PyTorch's
autograd takes the gradient through that function. At the convolution's result v it is then affine,

    dv = dmean / S + dvariance · 2 (v − mean) / S  =  a + b · v,

so the backward pass turns v into dv and hands that to the convolution's gradients. The bias gets Σ dv = Σ dmean, for
what is left of v sums to nothing. v is kept; where the plan is lean, it is computed again, a few samples at a time.

Where the convolution is one of few channels, one kernel of ours does all of that and nothing of v's size is ever there,
from a table of a and b; where the chain is a norm and a reduction, one small launch makes the table
(`moments_gradient.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.plan import Plan
from postlude.plan.problem import memory_format
from postlude.plan.types import Moments as MomentsSink
from postlude.run.convolution_gradients import ConvolutionGradients
from postlude.run.differentiable import differentiable
from postlude.run.few_channels_gradient import FewChannelsGradients
from postlude.run.finish_moments import FinishMoments
from postlude.run.gpu import GpuRun, on_device_of
from postlude.run.library import CONVOLVED, cast_for_convolution, convolve, without_autocast
from postlude.run.moments import Moments, finish
from postlude.run.moments_gradient import CombinedMoments, MomentsGradient, closed_form, table_of
from postlude.run.passes import Partials, accumulator_of


class MomentsTraining:
    """A plan with its backward pass. Between the two it keeps the tensors it was given, two numbers a channel and,
    where the plan stores it, the convolution's result."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.chain = plan, plan.chain
        self.run = GpuRun(plan)
        item = plan.passes[-1]
        assert isinstance(item.sink, MomentsSink)
        assert isinstance(self.run.from_moments, FinishMoments)
        self.finish: FinishMoments = self.run.from_moments
        self.first = item.last + 1
        self.dtype = getattr(torch, plan.result_dtype)
        self.format = memory_format(plan.value.layout, plan.chain.dims)
        self.gradients: dict[int, ConvolutionGradients] = {}  # by samples of a slab
        few = plan.few_gradient
        self.few = None if few is None else FewChannelsGradients(plan, few)
        self.combine = None if few is None else CombinedMoments(plan.value)
        self.direct = None if few is None or closed_form(self.chain) is None else MomentsGradient(plan)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        result: Tensor = _MomentsFunction.apply(self, *cast_for_convolution(self.chain, tensors))  # type: ignore[no-untyped-call]
        return result

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Moments, Tensor | None]:
        value, partials = self.run.first_pass(tensors)
        assert partials is not None
        return self.finish(partials, tensors), self._combined(partials), value

    def _combined(self, partials: Partials) -> Moments:
        return self.finish.combined(partials) if self.combine is None else self.combine(partials)

    def gradients_again(self, tensors: Sequence[Tensor], dy: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """From the tensors alone, where nothing could be kept: the first pass runs again."""
        tensors = cast_for_convolution(self.chain, tensors)
        value, partials = self.run.first_pass(tensors)
        assert partials is not None
        return self.backward(tensors, self._combined(partials), value, dy, needs)

    def backward(
        self,
        tensors: Sequence[Tensor],
        moments: Moments,
        value: Tensor | None,
        dy: Tensor,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        conv = self.chain.producer
        assert conv is not None
        if self.direct is not None and self.few is not None:
            grads, table = self.direct(tensors, moments, dy, needs)
            if needs[0] or needs[1]:
                grads[:2] = self.few(tensors[0], tensors[1], table, needs[0], needs[1])
            return grads
        grads, dmean, dvariance = self._through_moments(tensors, moments, dy, needs)
        if conv.has_bias and needs[2]:
            grads[2] = dmean.sum(0).to(tensors[2].dtype)
        if needs[0] or needs[1]:
            slope = 2 * dvariance / moments.positions
            shift = dmean / moments.positions - slope * moments.mean
            if conv.has_bias:  # v is computed without it
                shift = shift + slope * tensors[2].double()
            if self.few is not None:
                table = table_of(shift, slope, dmean, moments)
                grads[:2] = self.few(tensors[0], tensors[1], table, needs[0], needs[1])
            else:
                grads[:2] = self._through_convolution(tensors[0], tensors[1], value, shift, slope, needs)
        return grads

    def _through_moments(
        self, tensors: Sequence[Tensor], moments: Moments, dy: Tensor, needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], Tensor, Tensor]:
        """Gradients of the tensors that the steps read, and of the means and variances, [N, C] float64."""
        assert moments.variance is not None
        roles = self.chain.roles
        wanted = [slot for slot, is_needed in enumerate(needs) if is_needed and roles[slot] not in CONVOLVED]
        leaves = {slot: tensors[slot].detach().requires_grad_() for slot in wanted}
        mean, variance = (t.detach().requires_grad_() for t in (moments.mean, moments.variance))
        with torch.enable_grad():
            given = [leaves.get(slot, t) for slot, t in enumerate(tensors)]
            result = finish(self.chain, Moments(mean, variance, moments.positions), self.first, self.dtype, given)
            sources = [mean, variance, *leaves.values()]
            found = torch.autograd.grad(result, sources, dy, allow_unused=True, materialize_grads=True)
        grads: list[Tensor | None] = [None] * len(tensors)
        for slot, gradient in zip(wanted, found[2:]):
            grads[slot] = gradient
        return grads, found[0], found[1]

    def _through_convolution(
        self, x: Tensor, weight: Tensor, value: Tensor | None, shift: Tensor, slope: Tensor, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        conv = self.chain.producer
        assert conv is not None
        dx = torch.empty_like(x) if needs[0] else None
        dw: Tensor | None = None
        shape = (-1, conv.out_channels, *[1] * self.chain.dims)
        for start in range(0, x.shape[0], self.plan.slab):
            part = slice(start, start + self.plan.slab)
            v = convolve(conv, x[part], weight, None, self.plan.library_tf32) if value is None else value[part]
            a, b = (t[part].to(v.dtype).view(shape) for t in (shift, slope))
            dv = torch.addcmul(a, b, v, out=v if value is None else None).contiguous(memory_format=self.format)
            gradients = self._gradients(len(v))
            packed = gradients.packed(dv)
            found = gradients(dv, packed, x[part], weight, needs[0], needs[1])
            if dx is not None and found[0] is not None:
                dx[part] = found[0]
            if found[1] is not None:
                dw = found[1].to(accumulator_of(self.plan.value)) if dw is None else dw + found[1]
        return [dx, None if dw is None else dw.to(weight.dtype)]

    def _gradients(self, samples: int) -> ConvolutionGradients:
        found = self.gradients.get(samples)
        if found is None:
            plan, conv = self.plan, self.chain.producer
            assert conv is not None
            x, value = (dataclasses.replace(s, shape=(samples, *s.shape[1:])) for s in (plan.input, plan.value))
            slab = dataclasses.replace(plan, input=x, value=value)
            found = self.gradients[samples] = ConvolutionGradients(slab, conv)
        return found


class _MomentsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, training: MomentsTraining, *tensors: Tensor) -> Tensor:
        with on_device_of(tensors[0]):
            result, moments, value = training.forward(tensors)
        ctx.training, ctx.positions = training, moments.positions
        # Running statistics have moved by then, and no gradient depends on them.
        kept = [None if slot in training.chain.moved else t for slot, t in enumerate(tensors)]
        ctx.save_for_backward(*kept, value, moments.mean, moments.variance)
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        training: MomentsTraining = ctx.training
        *kept, value, mean, variance = ctx.saved_tensors
        tensors = [dy.new_zeros(1) if tensor is None else tensor for tensor in kept]
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *differentiable(training.chain, tensors, dy, needs)
        with on_device_of(dy), without_autocast(dy):
            return None, *training.backward(tensors, Moments(mean, variance, ctx.positions), value, dy, needs)
