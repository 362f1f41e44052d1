"""The backward pass of a norm and its steps on the CPU: one kernel in C++, then PyTorch's convolution gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude import reverse
from postlude.emit_cpp import emit_cpp
from postlude.plan import Plan
from postlude.plan.problem import memory_format
from postlude.stages.convolution_gradients import convolution_gradients
from postlude.stages.cpu_kernel import TYPES, operand_types, operands
from postlude.stages.cpu_passes import sizes_of
from postlude.stages.gradient import gradient_of_vector, places_of, without_unread
from postlude.stages.pack import Unpacked
from postlude.stages.trace import launch_cpp
from postlude.steps import pass_slots

_PASSES = {"contiguous": "ContiguousGradient", "channels_last": "ChannelsLastGradient"}
_KERNEL = """#include "operands.h"
#include "gradient.h"

namespace {{
struct Kernel {{
  using Value = {value};
  using Given = {given};
  using List = Operands<{operands}>;
  using Written = Operands<{written}>;
  static constexpr int SUMS = {sums}, TOTALS = {totals}, GAMMA = {gamma};
{steps}}};
}}  // namespace

extern "C" void gradient(void* const* p, const double* n, int threads) {{
  const Sizes sizes{{int64_t(n[0]), int64_t(n[1]), int64_t(n[2]), int64_t(n[3]), 0, false, threads}};
  const auto saved = static_cast<const float*>(p[2]);
  const Gradients<Kernel> pass{{static_cast<const Kernel::Value*>(p[0]), static_cast<const Kernel::Given*>(p[1]), saved,
                               saved + sizes.samples * sizes.groups, static_cast<Kernel::Value*>(p[3]),
                               static_cast<double*>(p[4]), p + 5, p + 5 + Kernel::Written::count, sizes}};
  {layout}<Kernel>{{pass}}.run();
}}
"""


_TURN = """#include "turn.h"

extern "C" void turn(void* const* p, const double* n, int threads) {
  const Sizes sizes{int64_t(n[0]), int64_t(n[1]), int64_t(n[2]), 1, 0, false, threads};
  turn_all(static_cast<const float*>(p[0]), static_cast<float*>(p[1]), sizes);
}
"""


def backward_on_cpu(
    plan: Plan, tensors: Sequence[Tensor], value: Tensor, saved: Tensor, dy: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradient of every slot that needs one. `value` and `saved` come from the forward pass."""
    dv, found = _gradient_pass(
        plan, frozenset(i for i, is_needed in enumerate(needs) if is_needed), tensors, value, saved, dy
    )
    grads = [found.get(slot) for slot in range(len(needs))]
    if plan.chain.producer is None:
        grads[0] = dv.to(tensors[0].dtype) if needs[0] else None
    elif needs[0] or needs[1]:
        grads[:2] = convolution_gradients(plan, Unpacked(dv), None, Unpacked(tensors[0]), tensors[1], needs)
    return grads


def _channels_last(dy: Tensor, value: Tensor) -> Tensor:
    """The gradient of a contiguous result in the layout of its value: both are float32 there (cpu_passes.turns)."""
    turned = torch.empty_like(value)
    launch_cpp("turn", _TURN, {"dy": dy, "turned": turned}, sizes_of(value))
    return turned


def _gradient_pass(
    plan: Plan, needs: frozenset[int], tensors: Sequence[Tensor], value: Tensor, saved: Tensor, dy: Tensor
) -> tuple[Tensor, dict[int, Tensor]]:
    """The gradients at the first value, and of the tensors that the steps read, by slot."""
    chain, last, norm = plan.chain, plan.passes[-1].last, plan.norm
    assert norm is not None
    wanted, slots = reverse.wanted(chain, last, needs), pass_slots(chain, last)
    sums, gradient = reverse.sums(chain, last, needs), reverse.gradient(chain, last, needs)
    layout = memory_format(plan.value.layout, chain.dims)
    if plan.turns:
        dy = _channels_last(dy, value)
    else:
        dy = dy.to(getattr(torch, plan.result_dtype)).contiguous(memory_format=layout)
    read = operands(plan, slots, without_unread(chain, tensors, value, sums.loaded | gradient.loaded))
    full = [torch.empty_like(value, dtype=tensors[slot].dtype) for slot in wanted.full]
    batch, channels, _ = sizes_of(value)
    count = 2 + len(wanted.sums) + len(wanted.totals)
    added = torch.empty((count, batch, channels), dtype=torch.float64, device=value.device)
    dv = torch.empty_like(value)
    steps = emit_cpp(sums, "Sums", slots) + emit_cpp(gradient, "Gradient", slots)
    text = _KERNEL.format(
        value=TYPES[value.dtype],
        given=TYPES[dy.dtype],
        operands=operand_types(chain, slots, tensors),
        written=operand_types(chain, wanted.full, tensors),
        sums=2 + len(wanted.sums),
        totals=len(wanted.totals),
        gamma=-1 if norm.weight is None else slots.index(norm.weight.index),
        steps="".join(f"  {line}\n" for line in steps.splitlines()),
        layout=_PASSES[plan.value.layout],
    )
    written = {f"d{slot}": tensor for slot, tensor in zip(wanted.full, full)}
    given = {"value": value, "dy": dy, "saved": saved, "dv": dv, "sums": added, **written, **read}
    launch_cpp("gradient", text, given, (*sizes_of(value), norm.groups or channels))
    found = dict(zip(wanted.full, full))
    for slot, places in places_of(norm, wanted, needs).items():
        total = functools.reduce(torch.add, [added[place] for place in places])  # [N, C]
        is_row = chain.roles[slot] == "row"
        found[slot] = gradient_of_vector([total if is_row else total.sum(0)], tensors[slot])
    return dv, found
