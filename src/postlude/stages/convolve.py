"""Our convolution as an implicit GEMM over packed operands: with stride 1, or one GEMM per phase."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from postlude.plan import Plan
from postlude.plan.gemm import Gemm
from postlude.plan.problem import memory_format, power_in
from postlude.stages.cuts import Partials, is_wide
from postlude.stages.epilogue import Epilogue, product_tile
from postlude.stages.pack import Packed, Packing, Unpacked, matrices, pack_weight, planes
from postlude.stages.phases import launch_phases, pack_phases
from postlude.stages.residues import pack_residues, residue_pitch, strides
from postlude.stages.trace import Matrix, Pointer, or_unread
from postlude.stages.unfold import unfold_input


def input_packing(plan: Plan, gemm: Gemm) -> Packing:
    return Packing(plan.input, gemm.volume, gemm.arithmetic, gemm.channels)


def packed_input(plan: Plan, gemm: Gemm, x: Tensor) -> Packed:
    x = x.contiguous(memory_format=memory_format(plan.input.layout, plan.chain.dims))
    if gemm.unfolds:
        return unfold_input(x, plan.input, plan.chain.convolution, gemm)
    if gemm.volume.has_residues:
        return pack_residues(Unpacked(x), plan.input, gemm.volume, gemm.arithmetic, gemm.channels)
    return input_packing(plan, gemm)(x)


def convolve(
    plan: Plan, gemm: Gemm, packed: Packed, tensors: Sequence[Tensor]
) -> tuple[Tensor | None, Partials | None]:
    """Packs the weight and launches the GEMM over the packed input."""
    conv, volume, arithmetic = plan.chain.convolution, gemm.volume, gemm.arithmetic
    sizes = (conv.out_channels, conv.in_channels)
    if gemm.phases is not None:
        weight = pack_phases(gemm, gemm.phases, tensors[1], sizes, packed.largest)
    else:
        tile, taps = (volume, arithmetic, gemm.channels, gemm.block_c), math.prod(gemm.unfolded)
        weight = pack_weight(tensors[1], *tile, sizes, packed.largest, conv.transposed, taps)
    row, batch = volume.width * gemm.channels, plan.input.shape[0]
    shape = (batch * volume.sample_rows * volume.pitch // volume.width, row + (volume.span - 1) * gemm.channels)
    if volume.has_residues:
        shape = (volume.packed_rows(batch) * volume.pitch, gemm.channels)
    inputs = matrices(packed, shape, row, (gemm.rows, gemm.block_k))
    depth = weight.matrix.shape[1]
    columns = Matrix(weight.matrix, tuple(weight.matrix.shape), (depth, 1), (gemm.columns, gemm.block_k))
    flag = packed.largest[-1:] if arithmetic.keeps_infinities and packed.largest is not None else None
    product = (*inputs, columns, or_unread(weight.unscale, weight.matrix), or_unread(flag, weight.matrix))
    if gemm.phases is not None:
        return launch_phases(plan, gemm, gemm.phases, product, weight.matrix, tensors)
    return _launch(plan, gemm, product, weight.matrix, tensors)


def _launch(
    plan: Plan, gemm: Gemm, product: Sequence[Pointer], unread: Tensor, tensors: Sequence[Tensor]
) -> tuple[Tensor | None, Partials | None]:
    volume, positions = gemm.volume, math.prod(gemm.volume.out)
    end = Epilogue(plan, gemm.chunks, gemm.block_c)
    rows, first = volume.sample_rows * volume.pitch // volume.width, volume.padding[0]
    slices = (first, first + volume.space[0] - 1)
    if volume.has_residues:  # no tap is skipped: each residue has input in other slices
        slices = (0, volume.padded[0] + volume.kernel[0])
    pitches = (volume.pitch, volume.plane, residue_pitch(volume, plan.input.shape[0]))
    sizes = (rows, *pitches, *slices, *volume.out)
    constants = {
        "STEPS_FN": end.before,
        "KD": volume.kernel[0],
        "KH": volume.kernel[1],
        "KW": volume.kernel[2],
        **strides(volume),
        "K_PER_TAP_ROW": volume.span * gemm.channels,
        "C_PACKED": gemm.channels,
        "NEIGHBOURS": volume.width,
        **planes(gemm.arithmetic),
        **end.written,
        "IS_DENSE": volume.is_dense,
        "USES_INT64": is_wide(plan.value),
        "ALIGN": power_in(positions, 16) if volume.is_dense else power_in(math.gcd(volume.pitch, volume.out[2]), 4),
        **end.channels,
        **product_tile(gemm, plan.value),
    }
    numbers = (plan.value.shape[1], end.chunks, end.programs, *sizes)
    kernel = ("convolve", "convolve_kernel", (end.programs,))
    return end.launch(*kernel, product, unread, tensors, numbers, constants, gemm.warps)
