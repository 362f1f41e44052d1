"""The weight's gradient of a convolution of ours: both operands packed, one product over positions, its parts added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from postlude.chain import Convolution
from postlude.plan.gemm import WeightGemm
from postlude.plan.problem import Spec, power_of_two
from postlude.run.launch import Launch, accumulator, descriptor
from postlude.run.packing import InputPacking, Packed, weight_strides

_BLOCK = 128  # input channels that one program adds up


class WeightGradient:
    """For an input, a gradient and a weight of given shapes."""

    def __init__(self, conv: Convolution, gemm: WeightGemm, x: Spec, gradient: Spec) -> None:
        self.conv, self.gemm = conv, gemm
        self.pack_x = InputPacking(x, gemm.volume, gemm.arithmetic, gemm.channels)
        self.pack_x.front = gemm.front * gemm.neighbours * gemm.channels
        self.pack_g = InputPacking(gradient, gemm.gradient_volume, gemm.arithmetic, gemm.out_channels)
        kd, kh, kw = gemm.volume.kernel
        self.taps = kd * kh * kw
        self.acc = torch.float64 if gemm.arithmetic.operands == "float64" else torch.float32
        self.rows = x.shape[0] * gemm.volume.sample_rows * gemm.volume.pitch // gemm.neighbours
        self.parts = (gemm.splits, gemm.groups * gemm.shared, *gemm.result)
        self.product = self._product()
        self.sums: dict[tuple[int, ...], Launch] = {}  # by the weight's strides
        self.templates: tuple[Any, Any] | None = None

    def __call__(self, x: Tensor, gradient: Packed, weight: Tensor) -> Tensor:
        """The gradient of `weight`, of its dtype and strides."""
        x_high, x_low, x_largest = self.pack_x(x)
        g_high, g_low, g_largest = gradient
        if self.templates is None:
            self.templates = self._templates(x_high, g_high)
        rows, columns = self.templates
        parts = torch.empty(self.parts, dtype=self.acc, device=x.device)
        self.product(
            descriptor(rows, x_high),
            descriptor(rows, x_low),
            descriptor(columns, g_high),
            descriptor(columns, g_low),
            parts,
        )
        result = torch.empty_like(weight)
        launch = self.sums.get(weight.stride())
        if launch is None:
            launch = self.sums[weight.stride()] = self._sum(weight)
        launch(parts, x_largest, g_largest, result)
        return result

    def _product(self) -> Launch:
        from postlude.kernels.triton.weight_gradient import weight_gradient_kernel

        gemm, volume = self.gemm, self.gemm.volume
        rows, columns = gemm.result
        steps = -(-self.rows // (gemm.block_k * gemm.splits))
        grid = (gemm.groups * gemm.splits, -(-rows // gemm.rows), -(-columns // gemm.columns))
        following = 1 if gemm.neighbours == 1 else volume.pitch
        numbers = (rows, columns, steps, volume.pitch, volume.plane, following, gemm.shift, gemm.channels)
        constants = {
            "GROUPS": gemm.groups,
            "PER_PLANE": gemm.groups // volume.kernel[0],
            "PER_ROW": gemm.groups_of_a_row,
            "FRONT": gemm.front,
            "SHARED": gemm.shared,
            "J": gemm.neighbours,
            "PLANES": gemm.arithmetic.planes,
            "TURNED": gemm.turned,
            "BM": gemm.rows,
            "BN": gemm.columns,
            "BK": gemm.block_k,
            "STAGES": gemm.stages,
            "ACC": accumulator(self.acc),
        }
        return Launch(weight_gradient_kernel, grid, numbers, constants, gemm.warps)

    def _sum(self, weight: Tensor) -> Launch:
        from postlude.kernels.triton.pack import scale_for
        from postlude.kernels.triton.weight_gradient import add_splits_kernel

        conv, gemm = self.conv, self.gemm
        block = min(_BLOCK, power_of_two(conv.in_channels))
        constants = {
            "TAPS": self.taps,
            "KW": gemm.volume.kernel[2],
            "J": gemm.neighbours,
            "FLIP": conv.transposed,
            "SCALED": gemm.arithmetic.scaled,
            "BLOCK": block,
            "ACC": accumulator(self.acc),
            "SCALE": scale_for,
        }
        numbers = (*self.parts, conv.in_channels, *weight_strides(weight, conv.transposed))
        grid = (self.taps * conv.out_channels, -(-conv.in_channels // block))
        return Launch(add_splits_kernel, grid, numbers, constants)

    def _templates(self, x: Tensor, gradient: Tensor) -> tuple[Any, Any]:
        from triton.tools.tensor_descriptor import TensorDescriptor

        gemm = self.gemm
        each, rows = gemm.neighbours * gemm.channels, gemm.neighbours * gemm.out_channels
        columns = each + gemm.result[1] - gemm.channels  # a row's positions, wherever among its neighbours it begins
        return (
            TensorDescriptor(x, [self.rows + gemm.front, columns], [each, 1], [gemm.block_k, gemm.columns]),
            TensorDescriptor(gradient, [self.rows, rows], [rows, 1], [gemm.block_k, gemm.rows]),
        )
