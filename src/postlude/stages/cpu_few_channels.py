"""A convolution of few input channels on the CPU that keeps only moments: one call of kernels/cpp/few_channels.h
or correlation_moments.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.emit_cpp import emit_cpp
from postlude.plan import Plan
from postlude.plan.cpu_few_channels import CpuFewChannels
from postlude.stages.cpu_kernel import TYPES, End, before, operand_types, operands
from postlude.stages.library import as_plain
from postlude.stages.trace import launch_cpp
from postlude.steps import pass_slots

_KERNEL = """#include "{header}.h"
#include "moments_end.h"

namespace {{
struct Kernel {{
  using Value = {value};
  using List = Operands<{operands}>;
  static constexpr bool IS_PLAIN = {is_plain};
  static constexpr int64_t {sizes};
{steps}}};
}}  // namespace

extern "C" void few_channels(void* const* p, const double* n, int threads) {{
  const auto at = [&](int i) {{ return int64_t(n[i]); }};
  const Volume volume{{at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11)}};
  const auto weight = static_cast<const float*>(p[1]), bias = static_cast<const float*>(p[2]);
  const {pass_name}<Kernel, {way}> pass(static_cast<const Kernel::Value*>(p[0]), weight, bias, p + 4, volume, threads);
  end<Kernel>(pass.moments<{squares}>(), volume.samples, Kernel::COUT, p + 4, p[3]);
}}
"""


def convolve_moments(
    plan: Plan, own: CpuFewChannels, end: End, tensors: Sequence[Tensor], result: Tensor, squares: bool
) -> None:
    """Computes the moments of the convolution's result and writes what the chain's end makes of them to `result`."""
    chain, conv = plan.chain, plan.chain.convolution
    x, weight, *more = tensors
    plain, weight = as_plain(conv, weight)
    weight = weight.to(torch.float32).contiguous()
    bias = more[0].to(torch.float32) if conv.has_bias else torch.zeros(conv.out_channels, device=x.device)
    space, strides, padding = tuple(x.shape[2:]), x.stride(), plain.padding
    kernel, dilation = plain.kernel, plain.dilation
    if conv.dims == 2:
        space, padding, kernel, dilation = (1, *space), (0, *padding), (1, *kernel), (1, *dilation)
        strides = (*strides[:2], 0, *strides[2:])
    names = ("CIN", "COUT", "KD", "KH", "KW", "DD", "DH", "DW")
    sizes = zip(names, (conv.in_channels, conv.out_channels, *kernel, *dilation))
    slots = pass_slots(chain, end.last, 1)
    steps = emit_cpp(before(chain, end.first - 1, 1), "Before", slots) + end.text(chain, result.dtype, slots)
    text = _KERNEL.format(
        value=TYPES[x.dtype],
        operands=operand_types(chain, slots, tensors),
        is_plain=str(end.first == 1).lower(),
        sizes=", ".join(f"{name} = {size}" for name, size in sizes),
        steps="".join(f"  {line}\n" for line in steps.splitlines()),
        header="correlation_moments" if own.is_correlated else "few_channels",
        pass_name="CorrelationMoments" if own.is_correlated else "FewChannels",
        way="Winograd" if own.is_winograd else "Direct",
        squares=str(squares).lower(),
    )
    given = {"x": x, "weight": weight, "bias": bias.contiguous(), "result": result}
    numbers = (x.shape[0], *space, *strides, *padding)
    launch_cpp("few_channels", text, {**given, **operands(plan, slots, tensors)}, numbers)
