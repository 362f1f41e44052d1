"""Chains in training on a GPU: the fused forward pass, what it keeps, and the backward pass from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.plan import Plan
from postlude.plan.program import row_norm
from postlude.reverse import reads_no_value, slots_needed
from postlude.run.convolution_gradients import ConvolutionGradients
from postlude.run.differentiable import differentiable
from postlude.run.gpu import GpuRun, on_device_of
from postlude.run.gradient import GradientPasses
from postlude.run.library import cast_for_convolution, without_autocast
from postlude.run.rows_gradient import RowsGradient


class Training:
    """A plan with its backward pass. Between the two it keeps the tensors whose values matter, the convolution's result
    and the norm's moments. Where the plan is lean, the convolution is computed again instead; where the chain's result
    tells all that the steps' gradients need, that is kept."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.chain = plan, plan.chain
        self.run = GpuRun(plan, keeps_value=not plan.is_lean and not plan.from_result)
        self.reads_no_value = plan.from_result and reads_no_value(plan.chain, len(plan.chain.steps))
        self.needed = slots_needed(plan.chain, len(plan.chain.steps), plan.from_result)
        self.convolution = None if plan.chain.producer is None else ConvolutionGradients(plan, plan.chain.producer)
        self.gradients: dict[frozenset[int], GradientPasses | RowsGradient] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        # Cast outside of the function that keeps tensors, so that they are kept as eager keeps them.
        result: Tensor = _ChainFunction.apply(self, *cast_for_convolution(self.chain, tensors))  # type: ignore[no-untyped-call]
        return result

    def gradients_again(self, tensors: Sequence[Tensor], dy: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """From the tensors alone, where nothing could be kept: the first pass runs again."""
        tensors = cast_for_convolution(self.chain, tensors)
        value, moments = self.value_again(tensors)
        return self.backward(tensors, value, moments, dy, needs)

    def value_again(self, tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """What the backward pass reads, and the norm's moments."""
        if self.plan.from_result:
            return self.run.parts(tensors)[0], None
        value, partials = self.run.first_pass(tensors)
        assert value is not None
        return value, self.run.group_moments(partials)

    def backward(
        self,
        tensors: Sequence[Tensor],
        value: Tensor,
        moments: tuple[Tensor, Tensor] | None,
        dy: Tensor,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """The gradient of every slot that needs one."""
        wanted = frozenset(slot for slot, is_needed in enumerate(needs) if is_needed)
        passes = self.gradients.get(wanted)
        if passes is None:
            passes = self.gradients[wanted] = self._passes(wanted)
        dv: Tensor | None
        largest = None if self.convolution is None else self.convolution.none_found(dy.device)
        dv, found = passes(value, moments, dy, tensors, largest)
        grads = [found.get(slot) for slot in range(len(needs))]
        if self.convolution is None:
            grads[0] = dv.to(tensors[0].dtype) if needs[0] else None
        elif needs[0] or needs[1]:
            packed = (dv, dv, dv) if self.plan.packs_gradient else self.convolution.packed(dv, largest)
            dv = dv if packed is None else None  # of the result's size: not to be kept for nothing
            grads[:2] = self.convolution(dv, packed, tensors[0], tensors[1], needs[0], needs[1])
        return grads

    def _passes(self, wanted: frozenset[int]) -> GradientPasses | RowsGradient:
        if row_norm(self.chain) is not None:
            return RowsGradient(self.plan, wanted)
        packing = self.convolution.pack if self.convolution is not None and self.plan.packs_gradient else None
        return GradientPasses(self.plan, wanted, packing)


class _ChainFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, training: Training, *tensors: Tensor) -> Tensor:
        with on_device_of(tensors[0]):
            result, value, moments = training.run.parts(tensors)
        if training.plan.from_result:  # what is kept of a result must not be changed in place afterwards
            value = None if training.reads_no_value else result
        kept = [t if slot in training.needed else None for slot, t in enumerate(tensors)]
        ctx.training, ctx.shapes = training, [(t.shape, t.dtype) for t in tensors]
        ctx.save_for_backward(*kept, None if training.plan.is_lean else value, *(moments or (None, None)))
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        training: Training = ctx.training
        *kept, value, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        # What was not kept has no influence on any gradient: zeros of its shape do as well.
        tensors = [
            dy.new_zeros(()).to(dtype).expand(shape) if t is None else t for t, (shape, dtype) in zip(kept, ctx.shapes)
        ]
        if torch.is_grad_enabled():
            result = value if training.plan.from_result else None
            return None, *differentiable(training.chain, tensors, dy, needs, result)
        with on_device_of(dy), without_autocast(dy):
            if training.reads_no_value:
                value = dy  # anything of its shape
            elif value is None:
                value, _ = training.run.first_pass(tensors)
            moments = None if mean is None else (mean, rstd)
            return None, *training.backward(tensors, value, moments, dy, needs)
