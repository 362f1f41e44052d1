"""Our convolution that reads a channels-last input in place by TMA boxes: pack the weight, then one implicit GEMM."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from postlude.plan import Plan
from postlude.plan.boxes import Boxes
from postlude.plan.problem import memory_format
from postlude.stages.cuts import Partials, accumulator, accumulator_of, is_wide
from postlude.stages.epilogue import Epilogue
from postlude.stages.pack import Packed, Packing, pack_weight
from postlude.stages.trace import Matrix


def rows_packing(plan: Plan, boxes: Boxes) -> Packing:
    """The input as rows of channels, without a border."""
    return Packing(plan.input, boxes.rows, boxes.arithmetic, boxes.channels)


def convolve_boxes(
    plan: Plan, boxes: Boxes, tensors: Sequence[Tensor], packed: Packed | None = None
) -> tuple[Tensor | None, Partials | None]:
    """Launches packing and GEMM. If `packed` is given, it is the input as rows of channels already."""
    conv, volume = plan.chain.convolution, boxes.volume
    if packed is not None:
        x = packed.high
    else:
        x = tensors[0].contiguous(memory_format=memory_format(plan.input.layout, plan.chain.dims))
        x = rows_packing(plan, boxes)(x).high if boxes.packs else x
    tile, sizes = (volume, boxes.arithmetic, boxes.channels, boxes.block_c), (conv.out_channels, conv.in_channels)
    weight = pack_weight(tensors[1], *tile, sizes, None, conv.transposed).matrix
    end = Epilogue(plan, math.prod(boxes.tiles), boxes.block_c)
    constants = {
        "STEPS_FN": end.before,
        **dict(zip(("PD", "PH", "PW"), volume.padding)),
        "KD": volume.kernel[0],
        "KH": volume.kernel[1],
        "SPAN": volume.span,
        "C_PACKED": boxes.channels,
        "NEIGHBOURS": boxes.width,
        **end.written,
        "USES_INT64": is_wide(plan.value),
        **end.channels,
        "BLOCK_H": boxes.block_h,
        "BLOCK_J": boxes.block_j,
        "BLOCK_C": boxes.block_c,
        "BLOCK_K": boxes.block_k,
        "STAGES": boxes.stages,
        "ACC": accumulator(accumulator_of(plan.value)),
    }
    numbers = (plan.value.shape[1], end.chunks, *boxes.tiles[1:], volume.space[0], *volume.out)
    kernel = ("convolve_boxes", "convolve_boxes_kernel", (end.programs,))
    product = _matrices(boxes, plan.input.shape[0], x, weight)
    return end.launch(*kernel, product, weight, tensors, numbers, constants, boxes.warps)


def _matrices(boxes: Boxes, batch: int, x: Tensor, weight: Tensor) -> tuple[Matrix, Matrix]:
    depth, height, width = boxes.volume.space
    shape = (batch, depth, height, width // boxes.width, boxes.width * boxes.channels)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(5))
    box = (1, 1, boxes.block_h, boxes.block_j, boxes.block_k)
    rows = (boxes.width * boxes.block_c, boxes.block_k)
    return Matrix(x, shape, strides, box), Matrix(weight, tuple(weight.shape), (weight.shape[1], 1), rows)
