"""The gradient of upsampling on a GPU, at sizes of real networks, against float64."""

from __future__ import annotations

import pytest
import torch

from postlude.graph.upsample import gradient_is_right
from postlude.plan.problem import Layout, memory_format
from postlude.plan.upsample import Upsampling

pytestmark = pytest.mark.gpu

WAYS = {
    "trilinear": (Upsampling((40, 40, 32), (80, 80, 64), True), 32),
    "corners": (Upsampling((20, 19, 18), (40, 38, 37), True, aligns_corners=True), 24),
    "nearest": (Upsampling((20, 40, 40), (40, 80, 80), False), 64),
    "bilinear": (Upsampling((64, 64), (128, 128), True), 256),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", WAYS)
def testgradient_is_right(name: str, layout: Layout, dtype: torch.dtype) -> None:
    how, channels = WAYS[name]
    x = torch.empty((2, channels, *how.small), dtype=dtype, device="cuda")
    assert gradient_is_right(x.contiguous(memory_format=memory_format(layout, len(how.small))), how)
