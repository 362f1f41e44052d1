"""Gradients of a convolution of few input channels whose result nobody stored: kernels/cuda/few_channels_gradient.cu.

The gradient at the convolution's result v is affine in it, shift + slope · v, per sample and channel. The kernel reads
both from a table [N, COUT, 4]: shift and slope times 2^e, and e, which brings every magnitude under 2¹⁵.
"""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.plan.few_channels import Geometry
from postlude.plan.few_channels_gradient import FewChannelsGradient, gradient_shared_bytes
from postlude.stages.few_channels import common_macros, geometry_of, units_of, weight_strides
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
    """Those of the input and of the weight; tensors as for `convolve_moments`."""
    if x.dim() == 4:
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        given = (table, padding, settings, transposed, needs_input, needs_weight)
        dx, dw = few_channels_gradient(x, weight, *given)
        return (None if dx is None else dx.squeeze(2)), (None if dw is None else dw.squeeze(2))
    shape, out = geometry_of(x, weight, None, padding, transposed)
    d, h, w = x.shape[2:]
    deep, high, per_row = settings.tiles_along(shape, (d, h, w), needs_input)
    per_plane = high * per_row
    units = units_of(x, x.shape[0] * deep * per_plane)
    blocks = min(units, settings.programs) if settings.programs else units
    dx = torch.empty_like(x) if needs_input else None
    parts = None
    if needs_weight:
        parts = torch.empty((blocks * settings.splits, weight.numel()), dtype=torch.float32, device=x.device)
    with torch._C.DisableTorchFunction():  # for their strides alone
        dx_like, dw_like = torch.empty_like(x, device="meta"), torch.empty(weight.shape, device="meta")
    tiles = (units, deep * per_plane, per_plane, per_row)
    strides = (*weight_strides(weight, transposed), *weight_strides(dw_like, transposed))
    launch_cuda(
        "few_channels_gradient.cu",
        "few_channels_gradient",
        gradient_macros(settings, shape, needs_input, needs_weight),
        (blocks, 1),
        settings.warps * 32,
        [x, weight, table, parts, dx],
        (*tiles, *out, *x.stride(), d, h, w, *dx_like.stride(), *strides, 0),
    )
    if parts is None:
        return dx, None
    return dx, parts.sum(0, dtype=torch.float64).to(weight.dtype).view(weight.shape)


def gradient_macros(
    settings: FewChannelsGradient, shape: Geometry, needs_input: bool, needs_weight: bool
) -> dict[str, int]:
    if settings.warps % settings.splits or shape.channel_blocks > 1:
        raise ValueError(f"{settings} and {shape} are not for this kernel: splits divide warps, 32 channels at most")
    return common_macros(settings, shape) | {
        "WEIGHT": int(needs_weight),
        "INPUT": int(needs_input),
        "SPLITS": settings.splits,
        "PROMOTE": settings.promote,
        "SHARED_BYTES": gradient_shared_bytes(settings, shape, needs_input),
    }
