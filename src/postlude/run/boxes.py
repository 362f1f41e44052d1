"""Our convolution that reads rows of channels where they lie: pack the weight, then one launch of the product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.plan import Plan
from postlude.plan.boxes import Boxes
from postlude.run.first_pass import FirstPass
from postlude.run.launch import Launch, accumulator, descriptor
from postlude.run.packing import InputPacking, Packed, weight_launch, weight_strides
from postlude.run.passes import Partials

_ALIGNED = 16  # bytes: where a descriptor may begin


class BoxesConvolution(FirstPass):
    """Packs the weight, and the input where it is none of rows of channels, then multiplies."""

    def __init__(self, plan: Plan, boxes: Boxes) -> None:
        super().__init__(plan, math.prod(boxes.tiles))
        conv = plan.chain.producer
        assert conv is not None
        self.boxes = boxes
        self.operand = getattr(torch, boxes.arithmetic.operands)  # not the weight's: under autocast that is float32
        self.transposed, self.sizes = conv.transposed, (conv.out_channels, conv.in_channels)
        self.pack = InputPacking(plan.input, boxes.rows, boxes.arithmetic, boxes.channels) if boxes.packs else None
        self.weights: dict[tuple[int, ...], Launch] = {}  # by the weight's strides
        self.templates: tuple[Any, Any] | None = None
        self.launch = self._prepared()

    def __call__(
        self, tensors: Sequence[Tensor], packed: Packed | None = None
    ) -> tuple[Tensor | None, Partials | None]:
        """`packed` is the input, where it was brought into rows before: then it is read instead of the tensor."""
        x, weight = packed[0] if packed is not None else self._rows(tensors[0]), self._packed(tensors[1])
        if self.templates is None:
            self.templates = _templates(self.boxes, self.value.shape[0], x, weight)
        operands = [descriptor(template, base) for template, base in zip(self.templates, (x, weight))]
        return self.run(operands, weight, tensors)

    def _rows(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=self.input_format)
        if self.pack is not None:
            return self.pack(x)[0]
        return x if x.data_ptr() % _ALIGNED == 0 else x.clone()

    def _packed(self, weight: Tensor) -> Tensor:
        """[rows, K], every call anew: weights may change without a trace."""
        boxes, volume = self.boxes, self.boxes.volume
        rows = -(-self.sizes[0] // boxes.block_c) * boxes.block_c
        columns = volume.kernel[0] * volume.kernel[1] * volume.span * boxes.channels
        packed = torch.empty((rows * boxes.width, columns), dtype=self.operand, device=weight.device)
        launch = self.weights.get(weight.stride())
        if launch is None:
            numbers = (*self.sizes, *weight_strides(weight, self.transposed))
            tile = (volume, boxes.arithmetic, boxes.channels, boxes.block_c)
            launch = self.weights[weight.stride()] = weight_launch(*tile, rows, numbers, self.transposed)
        launch(weight, packed, packed, packed)
        return packed

    def _prepared(self) -> Launch:
        from postlude.kernels.triton.convolve_boxes import convolve_boxes_kernel

        boxes, volume, (batch, channels, *_) = self.boxes, self.boxes.volume, self.value.shape
        blocks_c, positions = -(-channels // boxes.block_c), math.prod(volume.out)
        constants = {
            "BEFORE": self.before,
            **dict(zip(("PD", "PH", "PW"), volume.padding)),
            "KD": volume.kernel[0],
            "KH": volume.kernel[1],
            "SPAN": volume.span,
            "C": boxes.channels,
            "WIDTH": boxes.width,
            "STORE": self.store,
            "MOMENTS": self.moments,
            "LAST": self.value.layout == "channels_last",
            "WIDE": positions * channels >= 1 << 31,
            "FULL": channels % boxes.block_c == 0,
            "BLOCKS_C": blocks_c,
            "BH": boxes.block_h,
            "BJ": boxes.block_j,
            "BC": boxes.block_c,
            "BK": boxes.block_k,
            "STAGES": boxes.stages,
            "ACC": accumulator(self.acc),
        }
        numbers = (channels, self.chunks, *boxes.tiles[1:], volume.space[0], *volume.out)
        grid = (batch * self.chunks * blocks_c,)
        return Launch(convolve_boxes_kernel, grid, numbers, constants, boxes.warps)


def _templates(boxes: Boxes, batch: int, x: Tensor, weight: Tensor) -> tuple[Any, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    depth, height, width = boxes.volume.space
    column = boxes.width * boxes.channels
    shape = [batch, depth, height, width // boxes.width, column]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(5)]
    box = [1, 1, boxes.block_h, boxes.block_j, boxes.block_k]
    rows = [boxes.width * boxes.block_c, boxes.block_k]
    return (
        TensorDescriptor(x, shape, strides, box),
        TensorDescriptor(weight, [*weight.shape], [weight.shape[1], 1], rows),
    )
