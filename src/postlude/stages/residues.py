"""Packing the input of a strided convolution by residue."""

from __future__ import annotations

import torch

from postlude.plan.gemm import Arithmetic
from postlude.plan.problem import Spec, power_of_two
from postlude.plan.volume import Volume
from postlude.stages.pack import Packed, Unpacked, find_largest, planes
from postlude.stages.trace import launch, or_unread

_BLOCK = 64  # positions of a tile


def pack_residues(given: Unpacked, spec: Spec, volume: Volume, arithmetic: Arithmetic, channels: int) -> Packed:
    """Packs a tensor as [residues · rows, pitch, channels]."""
    x, largest = given
    if largest is None and arithmetic.scaled:
        largest = find_largest(x, spec, arithmetic)
    shape = (volume.packed_rows(spec.shape[0]), volume.pitch, channels)
    dtype = getattr(torch, arithmetic.operands)
    high = torch.empty(shape, dtype=dtype, device=x.device)
    low = torch.empty(shape, dtype=dtype, device=x.device) if arithmetic.planes == 2 else None
    _, along_y, along_x = (axis.residues for axis in volume.axes)
    rows, width = shape[0] // volume.residues, volume.space[2]
    block, block_c = min(_BLOCK, max(16, power_of_two(width))), min(64, channels & -channels)
    padding = volume.padding[2] + max(0, volume.pitch * volume.stride[2] - volume.padding[2] - width)
    launch(
        "residues",
        "pack_residues_kernel",
        (shape[0] // along_x, -(-width // block), channels // block_c),
        [x, high, or_unread(low, high), or_unread(largest, high)],
        (*spec.shape[:2], *volume.space, *volume.padding, volume.pitch, volume.padded[1], volume.sample_rows, rows),
        {
            **strides(volume),
            "RESIDUES_H": along_y,
            "RESIDUES_W": along_x,
            "C_PACKED": channels,
            **planes(arithmetic),
            "IS_CHANNELS_LAST": spec.layout == "channels_last",
            "BLOCK_W": block,
            "BLOCK_C": block_c,
            "BLOCK_PAD": power_of_two(max(1, padding)),
        },
    )
    return Packed(high, low, largest)


def strides(volume: Volume) -> dict[str, int]:
    return {f"STRIDE_{axis}": stride for axis, stride in zip("DHW", volume.stride)}


def residue_pitch(volume: Volume, batch: int) -> int:
    """Positions from one residue's volume to the next; 0 without strides."""
    return 0 if not volume.has_residues else volume.packed_rows(batch) // volume.residues * volume.pitch
