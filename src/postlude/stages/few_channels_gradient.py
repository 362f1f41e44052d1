"""Gradients of a convolution of few input channels whose result was not stored: kernels/cuda/few_channels_gradient.cu.

The gradient at the convolution's result v is affine in v, shift + slope · v, per sample and channel. The kernel reads a
table [N, C_OUT, 4]: shift · 2^e, slope · 2^e and e, where e brings every magnitude under 2¹⁵.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from postlude.plan.few_channels import Geometry
from postlude.plan.few_channels_gradient import FewChannelsGradient, gradient_shared_bytes
from postlude.stages.few_channels import common_macros, geometry_of, tensor_macros, units_of
from postlude.stages.trace import launch_cuda


def few_channels_gradient(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    padding: tuple[int, int, int],
    settings: FewChannelsGradient,
    transposed: bool,
    needs_input: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the input and of the weight. Tensors are as for `convolve_moments`."""
    if x.dim() == 4:
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        given = (table, padding, settings, transposed, needs_input, needs_weight)
        dx, dw = few_channels_gradient(x, weight, *given)
        return (None if dx is None else dx.squeeze(2)), (None if dw is None else dw.squeeze(2))
    shape, _ = geometry_of(x, weight, None, padding, transposed)
    d, h, w = x.shape[2:]
    tiles = settings.tiles_along(shape, (d, h, w), needs_input)
    units = units_of(x, x.shape[0] * math.prod(tiles))
    blocks = min(units, settings.programs) if settings.programs else units
    macros = gradient_macros(settings, shape, needs_input, needs_weight) | tensor_macros(x, weight, transposed, tiles)
    results: dict[str, Tensor] = {}
    if needs_weight:
        results["parts"] = torch.empty((blocks, weight.numel()), dtype=torch.float32, device=x.device)
    if needs_input:
        results["grad_x"] = dx = torch.empty_like(x)
        macros |= {f"DX_{axis}": stride for axis, stride in zip("NCDHW", dx.stride())}
    launch_cuda(
        "few_channels_gradient.cu",
        "few_channels_gradient",
        macros,
        (blocks, 1),
        settings.warps * 32,
        {"x": x, "weight": weight, "table": table, **results},
        (units, 0),
    )
    dw = results["parts"].sum(0, dtype=torch.float64).to(weight.dtype).view(weight.shape) if needs_weight else None
    return results.get("grad_x"), dw


def gradient_macros(
    settings: FewChannelsGradient, shape: Geometry, needs_input: bool, needs_weight: bool
) -> dict[str, int]:
    if shape.channel_blocks > 1:
        raise ValueError(f"{shape} is not for this kernel: 32 channels at most")
    return common_macros(settings, shape) | {
        "HAS_DW": int(needs_weight),
        "HAS_DX": int(needs_input),
        "SHARED_BYTES": gradient_shared_bytes(settings, shape, needs_input),
    }
