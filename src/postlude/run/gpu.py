"""Plans on a GPU: a convolution, PyTorch's or ours, then passes over its result, if any are left."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Normalize
from postlude.plan import Plan
from postlude.plan.boxes import Boxes
from postlude.plan.gemm import Gemm
from postlude.plan.problem import memory_format
from postlude.plan.program import row_norm
from postlude.plan.types import Moments, reads_moments
from postlude.reference import continue_from
from postlude.run.batch import CombineBatch
from postlude.run.boxes import BoxesConvolution
from postlude.run.channels import ChannelsPass
from postlude.run.few_channels import FewChannelsConvolution
from postlude.run.finish_moments import FinishMoments
from postlude.run.gemm import GemmConvolution
from postlude.run.library import cast_for_convolution, convolve
from postlude.run.passes import Combine, FinishPass, MomentsPass, Partials
from postlude.run.rows import RowsPass


class GpuRun:
    """A plan made ready: every launch is prepared once, the calls only allocate and launch."""

    def __init__(self, plan: Plan, keeps_value: bool = False) -> None:
        """`keeps_value`: the last pass leaves the convolution's result as it is, for a backward pass to read."""
        self.plan = plan
        chain, last = plan.chain, plan.passes[-1]
        self.own = _own_convolution(plan)
        self.moments = MomentsPass(plan) if reads_moments(plan.passes) else None
        makes_moments = self.moments or self.own
        chunks = 0 if makes_moments is None else makes_moments.chunks
        self.combine: Combine | CombineBatch | None = None
        self.finish: FinishPass | ChannelsPass | RowsPass | None = None
        self.from_moments = None
        if isinstance(last.sink, Moments):
            dtype = getattr(torch, plan.result_dtype)
            value = dataclasses.replace(plan.value, layout=plan.result_layout)
            self.from_moments = FinishMoments(chain, last.last + 1, last.sink.squares, value, chunks, dtype)
        elif row_norm(chain) is not None:
            self.finish = RowsPass(plan, keeps_value)
        elif last.source != "own convolution":
            norm = next((step for step in chain.steps[: last.last] if isinstance(step, Normalize)), None)
            if norm is not None:
                self.combine = (CombineBatch if norm.over == "batch" else Combine)(norm, plan.value, chunks)
            per_group = 1 if self.combine is None else self.combine.per_group
            ends = plan.channels_end is not None
            self.finish = ChannelsPass(plan, per_group) if ends else FinishPass(plan, per_group, keeps_value)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        with on_device_of(tensors[0]):
            return self.parts(tensors)[0]

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        """The chain's result, the value that its last pass read, and the norm's means and reciprocal deviations."""
        value, partials = self.first_pass(tensors)
        if self.from_moments is not None:
            assert partials is not None
            return self.from_moments(partials, tensors), value, None
        assert value is not None
        result, moments = value, self.group_moments(partials, tensors)
        if self.finish is not None:
            result = self.finish(value, moments, tensors)
        last = self.plan.passes[-1].last
        if last < len(self.plan.chain.steps):
            result = continue_from(self.plan.chain, last, result, tensors, moves=True)
        return result, value, moments

    def first_pass(self, tensors: Sequence[Tensor]) -> tuple[Tensor | None, Partials | None]:
        value, partials = (self._first_value(tensors), None) if self.own is None else self.own(tensors)
        if self.moments is not None:
            assert value is not None
            partials = self.moments(value, tensors)
        return value, partials

    def group_moments(
        self, partials: Partials | None, moved: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The norm's; the running statistics among the tensors `moved` move."""
        return None if self.combine is None or partials is None else self.combine(partials, moved)

    def _first_value(self, tensors: Sequence[Tensor]) -> Tensor:
        plan = self.plan
        conv = plan.chain.producer
        layout = memory_format(plan.value.layout, plan.chain.dims)
        if conv is None:
            return tensors[0].contiguous(memory_format=layout)
        x, weight = cast_for_convolution(plan.chain, tensors[:2])
        result = convolve(conv, x, weight, None, plan.library_tf32)  # the program adds the bias
        return result.contiguous(memory_format=layout)


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, whatever its pointers say."""
    device = tensor.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def _own_convolution(plan: Plan) -> GemmConvolution | BoxesConvolution | FewChannelsConvolution | None:
    if isinstance(plan.own, Boxes):
        return BoxesConvolution(plan, plan.own)
    if isinstance(plan.own, Gemm):
        return GemmConvolution(plan, plan.own)
    return None if plan.own is None else FewChannelsConvolution(plan, plan.own)
