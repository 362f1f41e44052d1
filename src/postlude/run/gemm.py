"""Our own convolution on a GPU: pack both operands, then one launch of the product with what follows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.plan import Plan
from postlude.plan.gemm import Gemm
from postlude.plan.problem import power_in
from postlude.run.first_pass import FirstPass
from postlude.run.launch import Launch, accumulator, descriptor
from postlude.run.packing import InputPacking, Packed, weight_launch, weight_strides
from postlude.run.passes import Partials
from postlude.run.phases import phased_launch, phased_weight_launch
from postlude.run.unfolding import Unfolding


class GemmConvolution(FirstPass):
    """Packs both operands, then multiplies them."""

    def __init__(self, plan: Plan, gemm: Gemm) -> None:
        is_last = gemm.phases is None or plan.value.layout == "channels_last"
        super().__init__(plan, gemm.chunks, "[None, :]" if is_last else "[:, None]")
        self.pack = Packing(plan, gemm)
        if gemm.phases is None:
            self.launch = self._prepared(gemm)
        else:
            self.launch = phased_launch(gemm, gemm.phases, self.before, self.value, self.store, self.moments)

    def __call__(
        self, tensors: Sequence[Tensor], packed: Packed | None = None
    ) -> tuple[Tensor | None, Partials | None]:
        """`packed` is the input, where it was packed before: then it is read instead of the tensor."""
        x = tensors[0] if packed is not None else tensors[0].contiguous(memory_format=self.input_format)
        operands, unscale, flag = self.pack(x, tensors[1], packed)
        return self.run((*operands, unscale, flag), unscale, tensors)

    def _prepared(self, gemm: Gemm) -> Launch:
        from postlude.kernels.triton.convolve import convolve_kernel

        volume, (batch, channels, *_) = gemm.volume, self.value.shape
        blocks_c, positions = -(-channels // gemm.block_c), math.prod(volume.out)
        units = batch * self.chunks * blocks_c
        rows, first = volume.sample_rows * volume.pitch // volume.width, volume.padding[0]
        sizes = (rows, volume.pitch, volume.plane, first, first + volume.space[0] - 1, *volume.out)
        constants = {
            "BEFORE": self.before,
            "KD": volume.kernel[0],
            "KH": volume.kernel[1],
            "SPAN_C": volume.span * gemm.channels,
            "C": gemm.channels,
            "WIDTH": volume.width,
            "PLANES": gemm.arithmetic.planes,
            "SCALED": gemm.arithmetic.scaled,
            "KEEPS": gemm.arithmetic.keeps_infinities,
            "STORE": self.store,
            "MOMENTS": self.moments,
            "LAST": self.value.layout == "channels_last",
            "DENSE": volume.is_dense,
            "WIDE": positions * channels >= 1 << 31,
            "ALIGN": power_in(positions, 16) if volume.is_dense else power_in(math.gcd(volume.pitch, volume.out[2]), 4),
            "FULL": channels % gemm.block_c == 0,
            "BLOCKS_C": blocks_c,
            "BM": gemm.rows,
            "BC": gemm.block_c,
            "BK": gemm.block_k,
            "STAGES": gemm.stages,
            "ACC": accumulator(self.acc),
        }
        return Launch(convolve_kernel, (units,), (channels, self.chunks, units, *sizes), constants, gemm.warps)


class Packing:
    """Input and weight as the two matrices of the product, every call anew: weights may change without a trace."""

    def __init__(self, plan: Plan, gemm: Gemm) -> None:
        conv, volume = plan.chain.producer, gemm.volume
        assert conv is not None
        self.gemm, self.arithmetic, self.batch = gemm, gemm.arithmetic, plan.input.shape[0]
        self.dtype = getattr(torch, gemm.arithmetic.operands)
        self.transposed, self.channels = conv.transposed, (conv.out_channels, conv.in_channels)
        self.outputs = -(-conv.out_channels // gemm.block_c) * gemm.block_c
        self.weight_shape = (self.outputs * volume.width, self.arithmetic.planes * gemm.depth)
        self.input = (
            Unfolding(plan.input, conv, gemm)
            if gemm.unfolds
            else InputPacking(plan.input, volume, gemm.arithmetic, gemm.channels)
        )
        self.weights: dict[tuple[int, ...], Launch] = {}  # by the weight's strides
        self.templates: tuple[Any, Any] | None = None

    def __call__(
        self, x: Tensor, weight: Tensor, packed_x: Packed | None = None
    ) -> tuple[tuple[Any, Any, Any], Tensor, Tensor]:
        """Descriptors of both planes (one twice, where there is one) and of the weight, what undoes its scales, and
        whether there is an infinity."""
        high, low, largest = packed_x or self.input(x)
        packed = torch.empty(self.weight_shape, dtype=self.dtype, device=x.device)
        unscale = packed
        if self.arithmetic.scaled:
            unscale = torch.empty(self.outputs, dtype=torch.float32, device=x.device)
        launch = self.weights.get(weight.stride())
        if launch is None:
            launch = self.weights[weight.stride()] = self._weight(weight)
        launch(weight, packed, largest, unscale)
        if self.templates is None:
            self.templates = _templates(self.gemm, self.batch, high, packed)
        rows, columns = self.templates
        d_high = descriptor(rows, high)
        d_low = descriptor(rows, low) if self.arithmetic.planes == 2 else d_high
        flag = largest[-1:] if self.arithmetic.keeps_infinities else unscale  # unread
        return (d_high, d_low, descriptor(columns, packed)), unscale, flag

    def _weight(self, weight: Tensor) -> Launch:
        gemm = self.gemm
        numbers = (*self.channels, *weight_strides(weight, self.transposed))
        if gemm.phases is not None:
            return phased_weight_launch(gemm, gemm.phases, self.outputs, numbers)
        tile = (gemm.volume, gemm.arithmetic, gemm.channels, gemm.block_c)
        return weight_launch(*tile, self.outputs, numbers, self.transposed, math.prod(gemm.unfolded))


def _templates(gemm: Gemm, batch: int, high: Tensor, weight: Tensor) -> tuple[Any, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    volume = gemm.volume
    row = volume.width * gemm.channels
    shape = [batch * volume.sample_rows * volume.pitch // volume.width, row + (volume.span - 1) * gemm.channels]
    columns = [volume.width * gemm.block_c, gemm.block_k]
    return (
        TensorDescriptor(high, shape, [row, 1], [gemm.rows, gemm.block_k]),
        TensorDescriptor(weight, [*weight.shape], [weight.shape[1], 1], columns),
    )
