"""The backward pass of a plan on a GPU, from what the forward pass keeps.

The forward pass keeps the chain's inputs, the convolution's result and the norm's moments. A lean plan recomputes the
convolution instead of keeping its result. Where the steps' gradients can be computed from the chain's result, that is
kept instead.

Some chains need only the moments of the convolution's result v: their result depends on v through the mean and variance
of each sample and channel. The gradient at v is then affine in v,

    dv = dmean / S + dvariance · 2 (v − mean) / S  =  a + b · v.

The backward pass turns v into dv, from which PyTorch or our GEMMs compute the convolution's gradients. The bias's
gradient is Σ dv = Σ dmean, because v − mean sums to zero. v is kept; a lean plan recomputes it, a few samples at a
time. For a convolution of few channels one CUDA kernel does all of this from a table of a and b, and nothing of v's
size is stored. If such a chain is just a norm and a reduction, one small launch computes the table
(moments_gradient.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.moments import Moments, finish
from postlude.plan import Plan
from postlude.plan.passes import KeepMoments
from postlude.plan.problem import memory_format
from postlude.plan.through import Through
from postlude.plan.volume import volume_for
from postlude.reverse import needs_first_value, reads_no_value
from postlude.stages.convolution_gradients import convolution_gradients, packing_of_gradient
from postlude.stages.cuts import accumulator_of
from postlude.stages.few_channels_gradient import few_channels_gradient
from postlude.stages.forward import Parts, first_pass
from postlude.stages.gradient import gradient_passes
from postlude.stages.library import CONVOLVED, convolve_by_pytorch
from postlude.stages.linear import columns, linear_gradients
from postlude.stages.moments import closed_form, combined_by_pytorch
from postlude.stages.moments_gradient import combined_moments, moments_gradient, table_of
from postlude.stages.pack import Packed, Unpacked, none_found
from postlude.stages.rows import rows_gradient
from postlude.stages.through import gradients_through
from postlude.stages.trace import derived, settle_layout

Found = list[Tensor | None]  # one per slot; None where no gradient is wanted


def backward(
    plan: Plan, tensors: Sequence[Tensor], parts: Parts, moments: Moments | None, dy: Tensor, needs: Sequence[bool]
) -> Found:
    """The gradient of every slot that needs one. `parts` and `moments` come from the forward pass."""
    if isinstance(plan.own, Through):
        assert parts.produced is not None
        return gradients_through(plan.chain, plan.own, tensors, parts.produced, dy, needs)
    if moments is not None:
        return _from_moments(plan, tensors, parts, moments, dy, needs)
    value, chain = _value(plan, tensors, parts, dy), plan.chain
    wanted = frozenset(slot for slot, is_needed in enumerate(needs) if is_needed)
    largest = None
    if not chain.steps:  # a convolution or a linear layer alone
        others = [axis for axis in range(dy.dim()) if axis != 1]
        dv, found = dy, {2: dy.sum(others)} if len(needs) > 2 and needs[2] else {}
    elif plan.is_by_rows:
        dv, found = rows_gradient(plan, wanted, value, dy, tensors)
    else:
        if (scaled := plan.gradients.largest_found) is not None:
            largest = none_found(plan.value.shape[1], scaled, dy.device)
        packing = packing_of_gradient(plan) if plan.gradients.are_packed else None
        how = (packing, largest, parts.taps, parts.kept)
        dv, found = gradient_passes(columns(plan), wanted, value, parts.moments, dy, tensors, *how)
    grads = [found.get(slot) for slot in range(len(needs))]
    if chain.producer is None:
        grads[0] = dv.to(tensors[0].dtype) if needs[0] else None
    elif chain.is_linear:
        grads[:2] = linear_gradients(plan, dv, tensors[0], tensors[1], needs)
    elif needs[0] or needs[1]:
        packed = Packed(dv) if plan.gradients.are_packed else None
        given = (Unpacked(dv, largest), packed, Unpacked(tensors[0], parts.largest))
        grads[:2] = convolution_gradients(plan, *given, tensors[1], needs)
    return grads


def combined(plan: Plan, parts: Parts) -> Moments | None:
    """The moments [N, C] of the convolution's result, which the forward pass keeps if the chain needs nothing else."""
    sink = plan.passes[-1].sink
    if not isinstance(sink, KeepMoments):
        return None
    assert parts.partials is not None
    if plan.gradients.of_both is not None:
        return combined_moments(plan.value, parts.partials)
    return combined_by_pytorch(plan.value, sink.squares, parts.partials)


def _value(plan: Plan, tensors: Sequence[Tensor], parts: Parts, dy: Tensor) -> Tensor:
    """What the gradient passes read. Where they read no value, anything of its shape does."""
    chain, last = plan.chain, len(plan.chain.steps)
    if plan.gradients.from_result:
        return dy if reads_no_value(chain, last) else parts.result
    if plan.channels_end is not None and not needs_first_value(chain, last):
        dtype, layout = getattr(torch, plan.value.dtype), memory_format(plan.value.layout, chain.dims)
        return torch.empty(plan.value.shape, dtype=dtype, device=dy.device, memory_format=layout)
    value = first_pass(plan, tensors).value if plan.gradients.is_lean else parts.value
    assert value is not None
    return value


def _from_moments(
    plan: Plan, tensors: Sequence[Tensor], parts: Parts, moments: Moments, dy: Tensor, needs: Sequence[bool]
) -> Found:
    conv, is_wanted = plan.chain.convolution, needs[0] or needs[1]
    if plan.gradients.of_both is not None and closed_form(plan.chain.steps) is not None:
        grads, table = moments_gradient(plan, moments, dy, tensors, needs)
        grads[:2] = _by_few_channels(plan, tensors, table, needs) if is_wanted else (None, None)
        return grads
    grads, dmean, dvariance = _of_moments(plan, tensors, moments, dy, needs)
    if conv.has_bias and needs[2]:
        grads[2] = dmean.sum(0).to(tensors[2].dtype)
    if is_wanted:
        slope = 2 * dvariance / moments.positions
        shift = dmean / moments.positions - slope * moments.mean
        if conv.has_bias:  # v is computed without it
            shift = shift + slope * tensors[2].double()
        if plan.gradients.of_both is not None:
            grads[:2] = _by_few_channels(plan, tensors, table_of(shift, slope, dmean, moments), needs)
        else:
            x = Unpacked(tensors[0], parts.largest)
            grads[:2] = _part_by_part(plan, x, tensors[1], parts.value, shift, slope, needs)
    return grads


def _by_few_channels(
    plan: Plan, tensors: Sequence[Tensor], table: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    conv, few = plan.chain.convolution, plan.gradients.of_both
    assert few is not None
    padding = volume_for(conv, plan.input.shape[2:], 1).padding
    settings = few.both if needs[0] else few.weight
    how = (padding, settings, conv.transposed, needs[0], needs[1])
    return few_channels_gradient(tensors[0], tensors[1], table, *how)


def _of_moments(
    plan: Plan, tensors: Sequence[Tensor], moments: Moments, dy: Tensor, needs: Sequence[bool]
) -> tuple[Found, Tensor, Tensor]:
    """Gradients of the tensors that the steps read, and of the means and variances, [N, C] float64."""
    assert moments.variance is not None
    chain, first, dtype = plan.chain, plan.passes[-1].last + 1, getattr(torch, plan.result_dtype)
    # Running statistics do not affect the result, and the forward pass has updated them already.
    slots = [slot for slot, role in enumerate(chain.roles) if role not in CONVOLVED and slot not in chain.moved]

    def result(mean: Tensor, variance: Tensor, *read: Tensor) -> Tensor:
        given = dict(zip(slots, read))
        every = [given.get(slot, tensor) for slot, tensor in enumerate(tensors)]
        return finish(chain, Moments(mean, variance, moments.positions), first, dtype, every)

    dmean, dvariance, *found = derived(result, [moments.mean, moments.variance, *(tensors[s] for s in slots)], dy)
    grads: Found = [None] * len(tensors)
    for slot, gradient in zip(slots, found):
        grads[slot] = gradient if needs[slot] else None
    return grads, dmean, dvariance


def _part_by_part(
    plan: Plan,
    given: Unpacked,
    weight: Tensor,
    value: Tensor | None,
    shift: Tensor,
    slope: Tensor,
    needs: Sequence[bool],
) -> Found:
    """The convolution's gradients: a few samples at a time if its result is recomputed, all at once if it was kept."""
    conv, (x, largest) = plan.chain.convolution, given
    dx, dw = torch.empty_like(x) if needs[0] else None, None
    shape, layout = (-1, conv.out_channels, *[1] * plan.chain.dims), memory_format(plan.value.layout, plan.chain.dims)
    each = plan.gradients.samples_again or x.shape[0]
    for start in range(0, x.shape[0], each):
        part = slice(start, min(start + each, x.shape[0]))
        v = convolve_by_pytorch(conv, x[part], weight, None, plan.library_tf32) if value is None else value[part]
        a, b = (t[part].to(v.dtype).view(shape) for t in (shift, slope))
        dv = settle_layout(torch.addcmul(a, b, v, out=v if value is None else None), layout)
        samples = part.stop - part.start
        specs = [dataclasses.replace(s, shape=(samples, *s.shape[1:])) for s in (plan.input, plan.value)]
        of_part = dataclasses.replace(plan, input=specs[0], value=specs[1])
        found = convolution_gradients(of_part, Unpacked(dv), None, Unpacked(x[part], largest), weight, needs)
        if dx is not None and found[0] is not None:
            dx[part] = found[0]
        if found[1] is not None:
            dw = found[1].to(accumulator_of(plan.value)) if dw is None else dw + found[1]
    return [dx, None if dw is None else dw.to(weight.dtype)]
