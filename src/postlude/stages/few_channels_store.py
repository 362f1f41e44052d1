"""A convolution of 1 to 4 input channels whose result is stored: one launch of kernels/cuda/few_channels_store.cu."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from postlude.plan.few_channels import FewChannels, shared_bytes, tile_slots
from postlude.stages.few_channels import common_macros, geometry_of, tensor_macros, units_of
from postlude.stages.trace import launch_cuda


def convolve_stored(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: tuple[int, int, int],
    settings: FewChannels,
    keeps_infinities: bool,
    transposed: bool = False,
) -> Tensor:
    """Convolution + bias, contiguous; tensors and padding as few_channels.convolve_moments takes them."""
    dims = x.dim() - 2
    if dims == 2:
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    shape, out = geometry_of(x, weight, bias, padding, transposed)
    along = settings.tiles(out)
    units = units_of(x, x.shape[0] * math.prod(along))
    result = torch.empty((x.shape[0], shape.cout, *out[3 - dims :]), dtype=x.dtype, device=x.device)
    given = {} if bias is None else {"bias": bias.contiguous()}
    launch_cuda(
        "few_channels_store.cu",
        "few_channels_store",
        {
            **common_macros(settings, shape),
            **tensor_macros(x, weight, transposed, along),
            "HAS_BIAS": int(bias is not None),
            "KEEPS_INF": int(keeps_infinities),
            "TILE_SLOTS": tile_slots(settings, shape),
            "SHARED_BYTES": shared_bytes(settings, shape),
        },
        (min(units, settings.programs) if settings.programs else units, shape.channel_blocks),
        settings.warps * 32,
        {"x": x, "weight": weight, **given, "result": result},
        (units, 0),
    )
    return result
