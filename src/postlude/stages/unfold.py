"""Packs an input of few channels as a matrix whose rows hold the channels of several taps: a partial im2col."""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.chain import Convolution
from postlude.plan.gemm import Gemm
from postlude.plan.problem import Spec, power_of_two
from postlude.plan.volume import volume_for
from postlude.stages.cuts import is_wide
from postlude.stages.pack import Packed, find_largest, planes
from postlude.stages.trace import launch, or_unread

# Positions of a tile, and elements of a program in both planes. A warp then has the same few columns for all its
# positions: 40 registers and 0.30 ms, against 165 and 0.46 with (128, 8192), for 128×8×256² in one plane.
_BLOCK, _ELEMENTS = 32, 4096


def unfold_input(x: Tensor, spec: Spec, conv: Convolution, gemm: Gemm) -> Packed:
    volume, whole, arithmetic = gemm.volume, volume_for(conv, spec.shape[2:], 1), gemm.arithmetic
    rows = spec.shape[0] * volume.sample_rows
    largest = find_largest(x, spec, arithmetic) if arithmetic.scaled else None
    shape, dtype = (rows, volume.pitch, gemm.channels), getattr(torch, arithmetic.operands)
    high = torch.empty(shape, dtype=dtype, device=x.device)
    low = torch.empty_like(high) if arithmetic.planes == 2 else None
    block = min(_BLOCK, max(16, power_of_two(volume.pitch)))
    each = max(1, _ELEMENTS // (block * gemm.channels * arithmetic.planes))
    sizes = (*whole.space, *whole.padding, volume.pitch, volume.padded[1], volume.sample_rows)
    launch(
        "unfold",
        "unfold_input_kernel",
        (-(-rows // each) * -(-volume.pitch // block),),
        [x, high, or_unread(low, high), or_unread(largest, high)],
        (rows, spec.shape[1], *sizes),
        {
            "C_PACKED": gemm.channels,
            **planes(arithmetic),
            "IS_CHANNELS_LAST": spec.layout == "channels_last",
            "USES_INT64": is_wide(spec),
            "UNFOLDED_H": gemm.unfolded[0],
            "UNFOLDED_W": gemm.unfolded[1],
            "HAS_PADDING": any(whole.padding),
            "ROWS_PER_PROGRAM": each,
            "BLOCK_W": block,
        },
    )
    return Packed(high, low, largest)
