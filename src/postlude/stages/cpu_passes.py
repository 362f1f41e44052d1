"""Passes over a value on the CPU: each one kernel in C++ with one parallel region, around it PyTorch's convolution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from postlude.chain import Chain, Convolution
from postlude.emit_cpp import emit_cpp
from postlude.expressions import Function
from postlude.moments import Moments, finish
from postlude.plan import Plan
from postlude.plan.problem import Layout, memory_format
from postlude.plan.program import first_barrier, fused_norm
from postlude.plan.types import Moments as MomentsSink
from postlude.reference import continue_from, convolve
from postlude.stages.cpu_few_channels import convolve_moments
from postlude.stages.cpu_kernel import TYPES, before, operand_types, operands
from postlude.stages.library import cast_for_convolution
from postlude.stages.trace import launch_cpp, settle_layout
from postlude.steps import forward, pass_slots

_PASSES: dict[Layout, tuple[str, str]] = {
    "contiguous": ("contiguous.h", "Contiguous"),
    "channels_last": ("channels_last.h", "ChannelsLast"),
}
_KERNEL = """#include "{header}"

namespace {{
struct Kernel {{
  using Value = {value};
  using Result = {result};
  using List = Operands<{operands}>;
{steps}}};
}}  // namespace

extern "C" void {name}(void* const* p, const double* n, int threads) {{
  const Sizes sizes{{int64_t(n[0]), int64_t(n[1]), int64_t(n[2]), int64_t(n[3]), n[4], threads}};
  const {layout}<Kernel> pass(static_cast<const Kernel::Value*>(p[0]), {into}, sizes);
  pass.{run};
}}
"""


def forward_on_cpu(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
    """The convolution, over slabs of the batch where the plan says so, and one pass over each of its results."""
    chain, last = plan.chain, plan.passes[-1]
    dtype, batch = getattr(torch, plan.result_dtype), tensors[0].shape[0]
    if isinstance(last.sink, MomentsSink):
        found = _moments(plan, tensors, batch, last.last, last.sink.squares)
        return finish(chain, found, last.last + 1, dtype, tensors, plan.result_layout == "channels_last", moves=True)
    result: Tensor | None = None
    for start, here in slabs(plan, tensors):
        value, is_ours = _value(plan, here)
        if result is None and not (is_ours and plan.slabs == 1 and value.dtype == dtype):
            shape = (batch, *value.shape[1:])
            layout = memory_format(plan.value.layout, chain.dims)
            result = torch.empty(shape, dtype=dtype, device=value.device, memory_format=layout)
        into = value if result is None else result if plan.slabs == 1 else result[start : start + plan.slab]
        _finish_pass(plan, value, into, here)
        result = into if result is None else result
    assert result is not None
    return continue_from(chain, last.last, result, tensors, moves=True)


def slabs(plan: Plan, tensors: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """The tensors of some samples, and the first of them."""
    if plan.slabs == 1:
        yield 0, tensors
        return
    for start in range(0, tensors[0].shape[0], plan.slab):
        part = slice(start, start + plan.slab)
        yield start, [t[part] if role in ("input", "full", "row") else t for t, role in zip(tensors, plan.chain.roles)]


def _moments(plan: Plan, tensors: Sequence[Tensor], batch: int, last: int, squares: bool) -> Moments:
    channels, positions = plan.value.shape[1], math.prod(plan.value.shape[2:])
    mean, variance = (torch.empty((batch, channels), dtype=torch.float64, device=tensors[0].device) for _ in "mv")
    if plan.own_on_cpu is not None:
        convolve_moments(plan, plan.own_on_cpu, tensors, (mean, variance), last, squares)
        return Moments(mean, variance if squares else None, positions)
    for start, here in slabs(plan, tensors):
        value, _ = _value(plan, here)
        part = slice(start, start + plan.slab)
        of_part = (mean, variance) if plan.slabs == 1 else (mean[part], variance[part])
        _moments_pass(plan, value, of_part, here, last, squares)
    return Moments(mean, variance if squares else None, positions)


def _value(plan: Plan, tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """The chain's first value in the layout of the pass, and whether it may be overwritten."""
    chain = plan.chain
    conv, layout = chain.producer, memory_format(plan.value.layout, chain.dims)
    if conv is None:
        return tensors[0].contiguous(memory_format=layout), plan.input.layout != plan.value.layout
    x, weight, *more = cast_for_convolution(chain, tensors)
    bias = more[0] if conv.has_bias else None
    if plan.convolve == "direct":
        return _by_onednn(conv, x, weight, bias, layout), True
    return settle_layout(convolve(conv, x, weight, bias), layout), True


def _by_onednn(
    conv: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None, layout: torch.memory_format
) -> Tensor:
    """Without PyTorch's choice of library: with a batch of one it may leave oneDNN (measured 2 to 13 times slower)."""
    plain = conv.as_plain()
    assert plain is not None
    if conv.transposed:
        weight = weight.transpose(0, 1).flip(*range(2, 2 + conv.dims))
    x, weight = x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
    sizes = (list(plain.padding), list(plain.stride), list(plain.dilation), plain.groups)
    return settle_layout(torch.ops.aten.mkldnn_convolution(x, weight, bias, *sizes), layout)


def _finish_pass(plan: Plan, value: Tensor, result: Tensor, tensors: Sequence[Tensor]) -> None:
    """All steps that are fused, with the norm among them: one reading where a group of channels stays in cache."""
    chain, last, norm = plan.chain, plan.passes[-1].last, fused_norm(plan.chain)
    slots = pass_slots(chain, last, 1)
    steps = [(forward(chain, "whole", last, 1), "Whole")]
    if norm is not None:
        steps.append((before(chain, (first_barrier(chain) or 1) - 1), "Before"))
    channels = value.shape[1]
    name, run = ("map", "map()") if norm is None else ("normalize", "normalize()")
    text = kernel_text(name, run, plan.value.layout, chain, steps, slots, value, result, tensors)
    groups, eps = (1, 0.0) if norm is None else (norm.groups or channels, norm.eps)
    given = {"value": value, "result": result, **operands(plan, slots, tensors)}
    launch_cpp(name, text, given, (*sizes_of(value), groups, eps))


def _moments_pass(
    plan: Plan, value: Tensor, found: tuple[Tensor, Tensor], tensors: Sequence[Tensor], last: int, squares: bool
) -> None:
    chain = plan.chain
    slots, steps = pass_slots(chain, last, 1), [(before(chain, last), "Before")]
    run = f"moments<{str(squares).lower()}>(static_cast<double*>(p[1]), static_cast<double*>(p[2]))"
    text = kernel_text("moments", run, plan.value.layout, chain, steps, slots, value, None, tensors)
    given = {"value": value, "mean": found[0], "variance": found[1], **operands(plan, slots, tensors)}
    launch_cpp("moments", text, given, (*sizes_of(value), 1, 0.0))


def kernel_text(
    name: str,
    run: str,
    layout: Layout,
    chain: Chain,
    steps: Sequence[tuple[Function, str]],
    slots: Sequence[int],
    value: Tensor,
    result: Tensor | None,
    tensors: Sequence[Tensor],
) -> str:
    header, pass_name = _PASSES[layout]
    written = "".join(emit_cpp(function, struct, slots) for function, struct in steps)
    into = "nullptr, p + 3" if result is None else "static_cast<Kernel::Result*>(p[1]), p + 2"
    return _KERNEL.format(
        header=header,
        value=TYPES[value.dtype],
        result=TYPES[(value if result is None else result).dtype],
        operands=operand_types(chain, slots, tensors),
        steps="".join(f"  {line}\n" for line in written.splitlines()),
        name=name,
        layout=pass_name,
        into=into,
        run=run,
    )


def sizes_of(value: Tensor) -> tuple[int, int, int]:
    return value.shape[0], value.shape[1], math.prod(value.shape[2:])
