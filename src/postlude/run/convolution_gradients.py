"""From the gradient at a convolution's result to those of its input and weight: by products of ours, or by PyTorch."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from postlude.chain import Chain, Convolution
from postlude.plan import Pass, Plan, Store
from postlude.plan.gemm import input_gradient_of
from postlude.run.gemm import GemmConvolution
from postlude.run.weight_gradient import WeightGradient


class ConvolutionGradients:
    def __init__(self, plan: Plan, conv: Convolution) -> None:
        self.conv = conv
        self.input = self.weight = None
        x = dataclasses.replace(plan.input, dtype=plan.value.dtype)
        if plan.input_gradient is not None:
            chain = Chain(plan.chain.dims, input_gradient_of(conv), (), ("input", "weight"))
            passes = (Pass("own convolution", 1, 0, Store()),)
            back = dataclasses.replace(
                plan, chain=chain, input=plan.value, value=x, passes=passes, result_dtype=plan.value.dtype
            )
            self.input = GemmConvolution(back, plan.input_gradient)
        if plan.weight_gradient is not None:
            self.weight = WeightGradient(conv, plan.weight_gradient, x, plan.value)
        packs_alike = (
            plan.input_gradient is not None
            and plan.weight_gradient is not None
            and plan.input_gradient.volume == plan.weight_gradient.gradient_volume
        )
        self.pack = self.input.pack.input if self.input is not None and packs_alike else None
        # Scales would have to be known before the gradient is.
        self.packs_directly = self.pack is not None and not self.pack.arithmetic.scaled

    def __call__(self, dv: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool) -> list[Tensor | None]:
        """What needs no gradient gets None. `dv` has the layout of the convolution's result, or is packed already."""
        dx: Tensor | None = None
        dw: Tensor | None = None
        packed = None if self.pack is None else (dv, dv, dv) if self.packs_directly else self.pack(dv)
        if needs_x and self.input is not None:
            dx, _ = self.input((dv, weight), packed)
        if needs_weight and self.weight is not None:
            dw = self.weight(x, dv, weight, packed)
        left = [needs_x and dx is None, needs_weight and dw is None, False]
        if any(left):
            conv = self.conv
            sizes = (list(conv.stride), list(conv.padding), list(conv.dilation))
            more = (conv.transposed, list(conv.output_padding), conv.groups)
            found = torch.ops.aten.convolution_backward(dv, x, weight, None, *sizes, *more, left)
            dx, dw = found[0] if left[0] else dx, found[1] if left[1] else dw
        return [dx, dw]
