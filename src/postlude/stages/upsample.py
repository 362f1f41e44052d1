"""The gradient of upsampling, by one gathering pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from postlude.plan.problem import Layout, memory_format, power_of_two
from postlude.plan.upsample import Upsampling
from postlude.stages.trace import launch

# Elements and channels of a tile. Channels-last, a thread loads 8 channels of a position at once. Contiguous, 4
# channels share the index computations of a position; more would spill.
_TILES: dict[str, tuple[int, int]] = {"channels_last": (1024, 64), "contiguous": (512, 4)}
_WARPS = 4


def upsample_gradient(dy: Tensor, how: Upsampling, layout: Layout) -> Tensor:
    """The gradient of upsampling's input. Both `dy` and the result have this layout."""
    batch, channels, *space = dy.shape
    shape, form = (batch, channels, *how.small), memory_format(layout, len(space))
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=form)
    how = how.in_space()
    elements, most = _TILES[layout]
    block_c = min(power_of_two(channels), most)
    block_s = min(elements // block_c, max(16, power_of_two(math.prod(how.small))))
    names = ("D", "H", "W", "OD", "OH", "OW", "REACH_D", "REACH_H", "REACH_W")
    sizes = (*how.large, *how.small, *how.reach)
    launch(
        "upsample",
        "upsample_gradient_kernel",
        (batch * -(-math.prod(how.small) // block_s) * -(-channels // block_c),),
        [dy, dx],
        how.scales,
        {
            "C": channels,
            **dict(zip(names, sizes)),
            "IS_LINEAR": how.is_linear,
            "HAS_CENTRES": not how.aligns_corners if how.is_linear else how.is_exact,
            "IS_CHANNELS_LAST": layout == "channels_last",
            "USES_INT64": dy.numel() >= 1 << 31,
            "BLOCK_S": block_s,
            "BLOCK_C": block_c,
        },
        warps=_WARPS,
    )
    return dx
