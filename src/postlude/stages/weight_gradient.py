"""The weight's gradient of our convolution: both operands packed, one split-K GEMM over positions, then its parts
added."""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.chain import Convolution
from postlude.plan.gemm import WeightGemm
from postlude.plan.problem import Spec, power_of_two
from postlude.plan.program import Word
from postlude.stages.cuts import accumulator
from postlude.stages.pack import Packed, Packing, Unpacked, matrices, weight_strides
from postlude.stages.residues import residue_pitch, strides
from postlude.stages.trace import launch, or_unread

_BLOCK = 128  # input channels for which one program adds the parts


def gradient_packing(gemm: WeightGemm, gradient: Spec) -> Packing:
    """The packing of the gradient at the convolution's result, as the GEMM reads it."""
    return Packing(gradient, gemm.gradient_volume, gemm.arithmetic, gemm.out_channels)


def weight_gradient(
    conv: Convolution, gemm: WeightGemm, x: Unpacked, spec: Spec, gradient: Packed, weight: Tensor
) -> Tensor:
    """The gradient of `weight`, with its dtype and strides; `spec` is the input's."""
    packing = Packing(spec, gemm.volume, gemm.arithmetic, gemm.channels, gemm.front * gemm.neighbours * gemm.channels)
    return product_over_positions(conv, gemm, spec.shape[0], packing(*x), gradient, weight)


def product_over_positions(
    conv: Convolution, gemm: WeightGemm, batch: int, packed: Packed, gradient: Packed, weight: Tensor
) -> Tensor:
    """The same from the packed input."""
    acc = torch.float64 if gemm.arithmetic.operands == "float64" else torch.float32
    parts = torch.empty((gemm.splits, gemm.groups * gemm.shared, *gemm.result), dtype=acc, device=weight.device)
    _product(gemm, batch, packed, gradient, parts)
    result = torch.empty_like(weight)
    taps = gemm.volume.kernel[0] * gemm.volume.kernel[1] * gemm.volume.kernel[2]
    block = min(_BLOCK, power_of_two(conv.in_channels))
    launch(
        "weight_gradient",
        "add_splits_kernel",
        (taps * conv.out_channels, -(-conv.in_channels // block)),
        [parts, or_unread(packed.largest, parts), or_unread(gradient.largest, parts), result],
        (*parts.shape, conv.in_channels, *weight_strides(weight, conv.transposed)),
        {
            "TAPS": taps,
            "KW": gemm.volume.kernel[2],
            "NEIGHBOURS": gemm.neighbours,
            "IS_FLIPPED": conv.transposed,
            "IS_SCALED": gemm.arithmetic.scaled,
            "BLOCK_C": block,
            "ACC": accumulator(acc),
            "SCALE_FN": Word("scale_for"),
        },
    )
    return result


def _product(gemm: WeightGemm, batch: int, packed: Packed, gradient: Packed, parts: Tensor) -> None:
    volume, (rows, columns) = gemm.volume, gemm.result
    positions = batch * volume.sample_rows * volume.pitch // gemm.neighbours
    each, wide = gemm.neighbours * gemm.channels, gemm.neighbours * gemm.out_channels
    # The columns of a row: its positions, wherever among its neighbours it begins.
    shape = (positions + gemm.front, each + columns - gemm.channels)
    if volume.has_residues:
        shape = (volume.packed_rows(batch) * volume.pitch, each)
    inputs = matrices(packed, shape, each, (gemm.block_k, gemm.columns))
    slopes = matrices(gradient, (positions, wide), wide, (gemm.block_k, gemm.rows))
    steps = -(-positions // (gemm.block_k * gemm.splits))
    pitches = (volume.pitch, volume.plane, residue_pitch(volume, batch))
    following = 1 if gemm.neighbours == 1 else volume.pitch
    launch(
        "weight_gradient",
        "weight_gradient_kernel",
        (gemm.groups * gemm.splits, -(-rows // gemm.rows), -(-columns // gemm.columns)),
        [*inputs, *slopes, parts],
        (rows, columns, steps, *pitches, following, gemm.shift, gemm.channels),
        {
            "TAP_GROUPS": gemm.groups,
            "TAP_GROUPS_PER_SLICE": gemm.groups // volume.kernel[0],
            "TAP_GROUPS_PER_ROW": gemm.groups_of_a_row,
            "FRONT_ROWS": gemm.front,
            "PRODUCTS_PER_GROUP": gemm.shared,
            "KH": volume.kernel[1],
            "KW": volume.kernel[2],
            **strides(volume),
            "NEIGHBOURS": gemm.neighbours,
            "PLANES": gemm.arithmetic.planes,
            "IS_AB_SWAPPED": gemm.turned,
            "BLOCK_M": gemm.rows,
            "BLOCK_N": gemm.columns,
            "BLOCK_K": gemm.block_k,
            "STAGES": gemm.stages,
            "ACC": accumulator(parts.dtype),
        },
        gemm.warps,
    )
