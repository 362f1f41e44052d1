"""The forward pass of a plan on a GPU: a convolution, PyTorch's or ours, then passes over its result if any remain.

`plan/` has decided everything; here the stages follow. These functions are traced (trace.py), never called on data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from postlude.plan import Plan
from postlude.plan.boxes import Boxes
from postlude.plan.few_channels import FewChannels, StoredFewChannels
from postlude.plan.gemm import Gemm
from postlude.plan.linear import LinearGemm
from postlude.plan.passes import KeepMoments, reads_moments
from postlude.plan.problem import memory_format
from postlude.plan.through import Through
from postlude.plan.volume import volume_for
from postlude.reference import continue_from
from postlude.stages.batch import combine_batch
from postlude.stages.channels import Kept, channels_pass
from postlude.stages.convolve import convolve, packed_input
from postlude.stages.convolve_boxes import convolve_boxes
from postlude.stages.cuts import Partials
from postlude.stages.few_channels import convolve_moments
from postlude.stages.few_channels_store import convolve_stored
from postlude.stages.library import cast_for_convolution, convolve_by_pytorch
from postlude.stages.linear import columns, multiply
from postlude.stages.moments import finish_moments
from postlude.stages.normalize import combine_moments, finish_pass, moments_pass
from postlude.stages.pools import pools_pass
from postlude.stages.rows import rows_pass
from postlude.stages.through import Produced, finished, produced
from postlude.stages.trace import settle_layout


class Parts(NamedTuple):
    result: Tensor
    value: Tensor | None  # what the last pass read
    moments: tuple[Tensor, Tensor] | None  # the norm's mean and rstd
    partials: Partials | None
    taps: Tensor | None = None  # of a max_pool in training: where each window's largest lies
    kept: Kept = Kept()  # of a reduction over channels in training
    produced: Produced | None = None  # of a sum through its producer
    largest: Tensor | None = None  # magnitude of each channel of the input, which our GEMM scaled by


class First(NamedTuple):
    value: Tensor | None  # the chain's first value, if it is stored
    partials: Partials | None  # its partial moments, if they are needed
    largest: Tensor | None = None  # as in `Parts`


def forward(plan: Plan, tensors: Sequence[Tensor]) -> Parts:
    chain, last = plan.chain, plan.passes[-1]
    if isinstance(plan.own, Through):
        part = produced(chain, plan.own, tensors, plan.on_gpu)
        result = continue_from(chain, last.last, finished(chain, plan.own, part.result, tensors), tensors)
        return Parts(result, None, None, None, produced=part)
    value, partials, largest = first_pass(plan, tensors)
    if isinstance(last.sink, KeepMoments):
        assert partials is not None
        spec, dtype = dataclasses.replace(plan.value, layout=plan.result_layout), getattr(torch, plan.result_dtype)
        few = isinstance(plan.own, FewChannels)
        result = finish_moments(chain, last.last + 1, last.sink.squares, spec, dtype, partials, tensors, by_cuda=few)
        return Parts(result, value, None, partials, largest=largest)
    assert value is not None
    result, moments, taps, kept = value, group_moments(plan, partials, tensors), None, Kept()
    if plan.is_by_rows:
        result = rows_pass(plan, value, tensors)
    elif plan.pool is not None:
        result, taps = pools_pass(plan, value, moments, tensors)
    elif plan.over_channels is not None:
        result, kept = channels_pass(plan, value, moments, tensors)
    elif last.source != "own convolution":
        result = finish_pass(columns(plan), value, moments, tensors)
    if last.last < len(chain.steps):
        result = continue_from(chain, last.last, result, tensors, moves=True)
    return Parts(result, value, moments, partials, taps, kept, largest=largest)


def first_pass(plan: Plan, tensors: Sequence[Tensor]) -> First:
    """What the convolution gives, or the input, and the moments of it in a pass of their own where the plan has one."""
    first = _convolved(plan, tensors)
    if not reads_moments(plan.passes):
        return first
    assert first.value is not None
    return first._replace(partials=moments_pass(columns(plan), first.value, tensors))


def group_moments(
    plan: Plan, partials: Partials | None, moved: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor] | None:
    """The norm's mean and rstd from partial moments. Running statistics among the tensors `moved` are updated."""
    norm = plan.norm
    if norm is None or partials is None:
        return None
    if norm.over == "batch":
        return combine_batch(norm, columns(plan).value, partials, moved)
    return combine_moments(norm, plan.value, partials)


def _convolved(plan: Plan, tensors: Sequence[Tensor]) -> First:
    chain, own = plan.chain, plan.own
    conv = chain.producer
    layout = memory_format(plan.value.layout, chain.dims)
    if conv is None:
        return First(tensors[0].contiguous(memory_format=layout), None)
    if own is None:
        x, weight = cast_for_convolution(chain, tensors[:2])
        result = convolve_by_pytorch(conv, x, weight, None, plan.library_tf32)  # the program adds the bias
        return First(settle_layout(result, layout), None)
    if isinstance(own, LinearGemm):
        return First(*multiply(plan, own, cast_for_convolution(chain, tensors)))
    if isinstance(own, FewChannels | StoredFewChannels):
        x, weight, *more = cast_for_convolution(chain, tensors)
        padding = volume_for(conv, plan.input.shape[2:], 1).padding
        bias = more[0] if conv.has_bias else None
        if isinstance(own, FewChannels):
            return First(None, convolve_moments(x, weight, bias, padding, own, conv.transposed))
        x, is_last = x.contiguous(), len(plan.passes) == 1  # otherwise a later pass adds the bias
        settings = (padding, own.how, own.keeps_infinities, conv.transposed)
        return First(convolve_stored(x, weight, bias if is_last else None, *settings), None)
    assert isinstance(own, Gemm | Boxes)
    if isinstance(own, Boxes):
        return First(*convolve_boxes(plan, own, tensors))
    packed = packed_input(plan, own, tensors[0])
    return First(*convolve(plan, own, packed, tensors), packed.largest)
