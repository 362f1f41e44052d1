"""The gradient of upsampling by one pass that gathers it."""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.plan.problem import Layout, memory_format
from postlude.plan.upsample import Upsampling
from postlude.stages.trace import launch

_BLOCK, _WARPS = 512, 4


def upsample_gradient(dy: Tensor, how: Upsampling, layout: Layout) -> Tensor:
    """`dy` is in that layout, and so is what is found."""
    batch, channels, *space = dy.shape
    shape, form = (batch, channels, *how.small), memory_format(layout, len(space))
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=form)
    how = how.in_space()
    names = ("D", "H", "W", "OD", "OH", "OW", "REACH_D", "REACH_H", "REACH_W")
    sizes = (*how.large, *how.small, *how.reach)
    launch(
        "upsample",
        "upsample_gradient_kernel",
        (-(-dx.numel() // _BLOCK),),
        [dy, dx],
        (dx.numel(), *how.scales),
        {
            "C": channels,
            **dict(zip(names, sizes)),
            "IS_LINEAR": how.is_linear,
            "HAS_CENTRES": not how.aligns_corners if how.is_linear else how.is_exact,
            "IS_CHANNELS_LAST": layout == "channels_last",
            "USES_INT64": dy.numel() >= 1 << 31,
            "BLOCK_L": _BLOCK,
        },
        warps=_WARPS,
    )
    return dx
