"""The weight's gradient of a convolution of ours: both operands packed, one product over positions, its parts added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from postlude.chain import Convolution
from postlude.plan.gemm import WeightGemm
from postlude.plan.problem import Spec, power_of_two
from postlude.run.launch import Launch, accumulator, descriptor
from postlude.run.packing import InputPacking, weight_strides

_BLOCK = 128  # output channels that one program adds up


class WeightGradient:
    """For an input, a gradient and a weight of given shapes."""

    def __init__(self, conv: Convolution, gemm: WeightGemm, x: Spec, gradient: Spec) -> None:
        self.conv, self.gemm = conv, gemm
        self.pack_x = InputPacking(x, gemm.volume, gemm.arithmetic, gemm.channels)
        self.pack_g = InputPacking(gradient, gemm.gradient_volume, gemm.arithmetic, gemm.out_channels)
        kd, kh, kw = gemm.volume.kernel
        self.taps = kd * kh * kw
        self.acc = torch.float64 if gemm.arithmetic.operands == "float64" else torch.float32
        self.rows = x.shape[0] * gemm.volume.sample_rows * gemm.volume.pitch
        self.parts = (gemm.splits, self.taps, conv.in_channels, conv.out_channels)
        self.product = self._product()
        self.sums: dict[tuple[int, ...], Launch] = {}  # by the weight's strides
        self.templates: tuple[Any, Any] | None = None

    def __call__(self, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        """The gradient of `weight`, of its dtype and strides."""
        x_high, x_low, x_largest = self.pack_x(x)
        g_high, g_low, g_largest = self.pack_g(gradient)
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

        gemm, (kd, kh, kw) = self.gemm, self.gemm.volume.kernel
        cin, cout = self.conv.in_channels, self.conv.out_channels
        steps = -(-self.rows // (gemm.block_k * gemm.splits))
        grid = (kd * kh * gemm.splits, -(-cin // gemm.rows), -(-cout // gemm.columns))
        numbers = (cin, cout, steps, gemm.volume.pitch, gemm.volume.plane, gemm.shift)
        constants = {
            "KD": kd,
            "KH": kh,
            "KW": kw,
            "PLANES": gemm.arithmetic.planes,
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

        conv, (splits, taps, cin, cout) = self.conv, self.parts
        block = min(_BLOCK, power_of_two(cout))
        constants = {
            "TAPS": taps,
            "FLIP": conv.transposed,
            "SCALED": self.gemm.arithmetic.scaled,
            "BLOCK": block,
            "ACC": accumulator(self.acc),
            "SCALE": scale_for,
        }
        numbers = (splits, cin, cout, *weight_strides(weight, conv.transposed))
        return Launch(add_splits_kernel, (taps * cin, -(-cout // block)), numbers, constants)

    def _templates(self, x: Tensor, gradient: Tensor) -> tuple[Any, Any]:
        from triton.tools.tensor_descriptor import TensorDescriptor

        gemm = self.gemm
        return (
            TensorDescriptor(x, [self.rows, gemm.channels], [gemm.channels, 1], [gemm.block_k, gemm.rows]),
            TensorDescriptor(
                gradient, [self.rows, gemm.out_channels], [gemm.out_channels, 1], [gemm.block_k, gemm.columns]
            ),
        )
