"""From the gradient at a convolution's result to those of its input and weight: by products of ours, or by PyTorch."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from postlude.chain import Chain, Convolution
from postlude.plan import Pass, Plan, Store
from postlude.plan.boxes import Boxes
from postlude.plan.gemm import input_gradient_of
from postlude.run.boxes import BoxesConvolution
from postlude.run.gemm import GemmConvolution
from postlude.run.packing import InputPacking, Packed
from postlude.run.weight_gradient import WeightGradient


class ConvolutionGradients:
    def __init__(self, plan: Plan, conv: Convolution) -> None:
        self.conv = conv
        self.input: GemmConvolution | BoxesConvolution | None = None
        self.weight: WeightGradient | None = None
        packing = None
        x = dataclasses.replace(plan.input, dtype=plan.value.dtype)
        if plan.input_gradient is not None:
            chain = Chain(plan.chain.dims, input_gradient_of(conv), (), ("input", "weight"))
            passes = (Pass("own convolution", 1, 0, Store()),)
            back = dataclasses.replace(
                plan, chain=chain, input=plan.value, value=x, passes=passes, result_dtype=plan.value.dtype
            )
            if isinstance(plan.input_gradient, Boxes):
                self.input = BoxesConvolution(back, plan.input_gradient)
                packing = self.input.pack
            else:
                self.input = GemmConvolution(back, plan.input_gradient)
                assert isinstance(self.input.pack.input, InputPacking)  # these products unfold nothing
                packing = self.input.pack.input
        if plan.weight_gradient is not None:
            self.weight = WeightGradient(conv, plan.weight_gradient, x, plan.value)
        # Both read the gradient in the same volume.
        self.pack = packing if self.weight is not None else None
        self.finds_largest = plan.largest_found is not None

    def packed(self, dv: Tensor, largest: Tensor | None = None) -> Packed | None:
        """The gradient at the convolution's result as both products read it; None where PyTorch reads it as it is.

        `largest`: its channels' largest magnitudes, where they are known."""
        return None if self.pack is None else self.pack(dv, largest)

    def none_found(self, device: torch.device) -> Tensor | None:
        """For the pass that makes the gradient, where it finds its channels' largest magnitudes."""
        return self.pack.none_found(device) if self.pack is not None and self.finds_largest else None

    def __call__(
        self,
        dv: Tensor | None,
        packed: Packed | None,
        x: Tensor,
        weight: Tensor,
        needs_x: bool,
        needs_weight: bool,
    ) -> list[Tensor | None]:
        """What needs no gradient gets None. `dv`, in the layout of the result, is read where nothing is packed."""
        dx: Tensor | None = None
        dw: Tensor | None = None
        operand = packed[0] if packed is not None else dv
        assert operand is not None
        if needs_x and self.input is not None:
            dx, _ = self.input((operand, weight), packed)
        if needs_weight and self.weight is not None:
            dw = self.weight(x, packed or self.weight.pack_g(operand), weight)
        left = [needs_x and dx is None, needs_weight and dw is None, False]
        if any(left):
            conv = self.conv
            sizes = (list(conv.stride), list(conv.padding), list(conv.dilation))
            more = (conv.transposed, list(conv.output_padding), conv.groups)
            found = torch.ops.aten.convolution_backward(operand, x, weight, None, *sizes, *more, left)
            dx, dw = found[0] if left[0] else dx, found[1] if left[1] else dw
        return [dx, dw]
