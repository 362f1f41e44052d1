"""Passes over a value on the CPU after PyTorch's convolution: each is one C++ kernel with one parallel region."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Convolution
from postlude.emit_cpp import emit_cpp
from postlude.moments import laid_out
from postlude.plan import Plan
from postlude.plan.barriers import first_barrier
from postlude.plan.cpu_few_channels import CpuFewChannels
from postlude.plan.passes import CppPasses, KeepMoments
from postlude.plan.problem import Layout, memory_format, reduced_shape
from postlude.reference import continue_from, convolve
from postlude.stages.cpu_few_channels import convolve_moments
from postlude.stages.cpu_kernel import TYPES, End, before, end_of, first_step, operand_types, operands
from postlude.stages.cuts import result_like
from postlude.stages.library import as_plain, cast_for_convolution
from postlude.stages.trace import launch_cpp, settle_layout
from postlude.steps import forward, pass_slots

_PASSES: dict[Layout, tuple[str, str]] = {
    "contiguous": ("contiguous.h", "Contiguous"),
    "channels_last": ("channels_last.h", "ChannelsLast"),
}
_KERNEL = """#include "{header}"
#include "moments_end.h"

namespace {{
struct Kernel {{
  using Value = {value};
  using Result = {result};
  using List = Operands<{operands}>;
{steps}}};
}}  // namespace

extern "C" void {name}(void* const* p, const double* n, int threads) {{
  const Sizes sizes{{int64_t(n[0]), int64_t(n[1]), int64_t(n[2]), int64_t(n[3]), n[4], n[5] != 0, threads}};
  const {layout}<Kernel> pass(static_cast<const Kernel::Value*>(p[0]), {into}, {rest});
  {run};
}}
"""


def forward_on_cpu(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
    """The convolution over the whole batch, then one pass over its result, in place if the dtypes agree."""
    chain, last = plan.chain, plan.passes[-1]
    if isinstance(last.sink, KeepMoments):
        return _reduced(plan, tensors, getattr(torch, plan.result_dtype), last.last, last.sink.squares)
    value, is_ours = _value(plan, tensors)
    result = result_like(plan, value, is_ours, plan.turns)
    _finish_pass(plan, value, result, tensors)
    return continue_from(chain, last.last, result, tensors, moves=True)


def trained_on_cpu(plan: Plan, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and what the backward pass reads: the first value, without the convolution's bias, which is a step
    there, and the norm's means and reciprocal deviations, [2, N · G]."""
    value, is_ours = _value(plan, tensors)
    norm, (batch, channels, _) = plan.norm, sizes_of(value)
    assert norm is not None
    saved = torch.empty((2, batch * (norm.groups or channels)), device=value.device)
    result = result_like(plan, value, is_ours, plan.turns)
    _finish_pass(plan, value, result, tensors, saved)
    return result, value, saved


def _reduced(plan: Plan, tensors: Sequence[Tensor], dtype: torch.dtype, last: int, squares: bool) -> Tensor:
    """The result of a reduction that needs only the moments of the value after step `last`."""
    chain, end = plan.chain, end_of(plan.chain, last + 1)
    result = torch.empty(reduced_shape(end.reduce, plan.value.shape), dtype=dtype, device=tensors[0].device)
    if isinstance(plan.own, CpuFewChannels):
        convolve_moments(plan, plan.own, end, tensors, result, squares)
    else:
        _moments_pass(plan, end, _value(plan, tensors)[0], result, tensors, squares)
    result = laid_out(result, end.reduce, plan.result_layout == "channels_last")
    return continue_from(chain, end.last, result, tensors)


def _value(plan: Plan, tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """The chain's first value in the layout of the pass, and whether it may be overwritten."""
    chain = plan.chain
    conv, layout = chain.producer, memory_format(plan.value.layout, chain.dims)
    if conv is None:
        return tensors[0].contiguous(memory_format=layout), plan.input.layout != plan.value.layout
    x, weight, *more = cast_for_convolution(chain, tensors)
    bias = more[0] if conv.has_bias and not plan.trains else None
    if plan.library == "direct":
        return _by_onednn(conv, x, weight, layout), True
    return settle_layout(convolve(conv, x, weight, bias), layout), True


def _by_onednn(conv: Convolution, x: Tensor, weight: Tensor, layout: torch.memory_format) -> Tensor:
    """Calls oneDNN directly, also where PyTorch would convolve by loops of its own. The pass that follows adds the
    bias."""
    plain, weight = as_plain(conv, weight)
    x, weight = x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
    sizes = (list(plain.padding), list(plain.stride), list(plain.dilation), plain.groups)
    return settle_layout(torch.ops.aten.mkldnn_convolution(x, weight, None, *sizes), layout)


def _finish_pass(
    plan: Plan, value: Tensor, result: Tensor, tensors: Sequence[Tensor], saved: Tensor | None = None
) -> None:
    """All fused steps, the norm included. Memory is read once if a group of channels stays in cache."""
    chain, last, norm = plan.chain, plan.passes[-1].last, plan.norm
    first, channels = first_step(plan), value.shape[1]
    slots = pass_slots(chain, last, first)
    steps = emit_cpp(forward(chain, "whole", last, first), "Whole", slots)
    if norm is not None:
        steps = emit_cpp(before(chain, (first_barrier(chain) or 1) - 1, first), "Before", slots) + steps
    name = "map" if norm is None else "normalize"
    text = kernel_text(name, f"{name}{'_turned' * plan.turns}()", plan, steps, slots, value, result, tensors)
    groups, eps = (1, 0.0) if norm is None else (norm.groups or channels, norm.eps)
    kept = {} if saved is None else {"saved": saved}
    given = {"value": value, "result": result, **kept, **operands(plan, slots, tensors)}
    launch_cpp(
        name, text, given, (*sizes_of(value), groups, eps, plan.by == CppPasses(streams=True) and result is not value)
    )


def _moments_pass(
    plan: Plan, end: End, value: Tensor, result: Tensor, tensors: Sequence[Tensor], squares: bool
) -> None:
    chain, first = plan.chain, first_step(plan)
    slots = pass_slots(chain, end.last, first)
    steps = emit_cpp(before(chain, end.first - 1, first), "Before", slots) + end.text(chain, result.dtype, slots)
    text = kernel_text("moments", f"moments<{str(squares).lower()}>()", plan, steps, slots, value, None, tensors)
    given = {"value": value, "result": result, **operands(plan, slots, tensors)}
    launch_cpp("moments", text, given, (*sizes_of(value), 1, 0.0, False))


def kernel_text(
    name: str,
    run: str,
    plan: Plan,
    steps: str,
    slots: Sequence[int],
    value: Tensor,
    result: Tensor | None,
    tensors: Sequence[Tensor],
) -> str:
    """The C++ text of a pass. `result` is None if the pass ends in a reduction and writes nothing of the value's
    size."""
    header, layout = _PASSES[plan.value.layout]
    ends = "end<Kernel>({}, sizes.samples, sizes.channels, p + 2, p[1])"
    return _KERNEL.format(
        header=header,
        value=TYPES[value.dtype],
        result=TYPES[(value if result is None else result).dtype],
        operands=operand_types(plan.chain, slots, tensors),
        steps="".join(f"  {line}\n" for line in steps.splitlines()),
        name=name,
        layout=layout,
        into="nullptr" if result is None else "static_cast<Kernel::Result*>(p[1])",
        rest="p + 3, sizes, static_cast<float*>(p[2])" if plan.trains else "p + 2, sizes",
        run=ends.format(f"pass.{run}") if result is None else f"pass.{run}",
    )


def sizes_of(value: Tensor) -> tuple[int, int, int]:
    return value.shape[0], value.shape[1], math.prod(value.shape[2:])
