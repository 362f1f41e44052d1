"""The gradients of a convolution's input and weight from the gradient at its result, by our GEMMs or by PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Chain
from postlude.plan import Pass, Plan, Store
from postlude.plan.boxes import Boxes
from postlude.plan.gemm import Gemm, input_gradient_of
from postlude.stages.convolve import convolve, input_packing, packed_input
from postlude.stages.convolve_boxes import convolve_boxes, rows_packing
from postlude.stages.pack import Packed, Packing, Unpacked
from postlude.stages.residues import pack_residues
from postlude.stages.weight_gradient import gradient_packing, product_over_positions, weight_gradient


def packing_of_gradient(plan: Plan) -> Packing:
    """The packing of the gradient, in the volume that both GEMMs read."""
    product = plan.gradients.of_input
    assert product is not None
    back = _back(plan)
    return rows_packing(back, product) if isinstance(product, Boxes) else input_packing(back, product)


def convolution_gradients(
    plan: Plan, dv: Unpacked, packed: Packed | None, x: Unpacked, weight: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of input and weight; None for one that is not needed.

    Args:
        plan: The plan of the chain.
        dv: The gradient at the convolution's result, in that result's layout.
        packed: The same gradient as our GEMMs read it, if it was written packed.
        x: The convolution's input.
        weight: The convolution's weight.
        needs: Whether each slot needs a gradient.
    """
    conv, product, summed = plan.chain.convolution, plan.gradients.of_input, plan.gradients.of_weight
    if summed is not None and summed.volume.has_residues:
        strided = _of_transposed if conv.transposed else _of_strided
        return strided(plan, dv, x, weight, needs)
    if packed is None and product is not None and summed is not None:
        packed = packing_of_gradient(plan)(*dv)
    operand = dv.tensor if packed is None else packed.high
    dx: Tensor | None = None
    dw: Tensor | None = None
    # The weight's gradient first: its packed input is freed before the input's gradient, of the same size, is there.
    if needs[1] and summed is not None:
        packed = packed or gradient_packing(summed, plan.value)(operand)
        dw = weight_gradient(conv, summed, x, _back(plan).value, packed, weight)
    if needs[0] and product is not None:
        back = _back(plan)
        if isinstance(product, Boxes):
            dx, _ = convolve_boxes(back, product, (operand, weight), packed)
        else:
            dx, _ = convolve(back, product, packed or packed_input(back, product, operand), (operand, weight))
    left = [needs[0] and dx is None, needs[1] and dw is None, False]
    if any(left):
        sizes = (list(conv.stride), list(conv.padding), list(conv.dilation))
        more = (conv.transposed, list(conv.output_padding), conv.groups)
        found = torch.ops.aten.convolution_backward(operand, x.tensor, weight, None, *sizes, *more, left)
        dx, dw = found[0] if left[0] else dx, found[1] if left[1] else dw
    return [dx, dw]


def _of_transposed(plan: Plan, dv: Unpacked, x: Unpacked, weight: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of a strided transposed convolution: `dv` is packed by residue once for both.

    The input's gradient is a strided convolution of `dv` with the same weight, and the weight's gradient is that
    convolution's for the result's gradient `x`.
    """
    product, summed, back = plan.gradients.of_input, plan.gradients.of_weight, _back(plan)
    assert isinstance(product, Gemm)
    assert summed is not None
    packed = pack_residues(dv, plan.value, product.volume, product.arithmetic, product.channels)
    dw = None
    if needs[1]:
        outputs = gradient_packing(summed, back.value)(*x)
        dw = product_over_positions(back.chain.convolution, summed, plan.input.shape[0], packed, outputs, weight)
    dx = convolve(back, product, packed, (dv.tensor, weight))[0] if needs[0] else None
    return [dx, dw]


def _of_strided(plan: Plan, dv: Unpacked, x: Unpacked, weight: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of a strided convolution.

    The input's gradient is a transposed convolution of `dv`, phase by phase. The weight's reads `x` by residue, and
    `dv` with the pitch of a residue's volume: the same packed `dv`, unless the phases need zeros in front of a row for
    inputs that no tap reads (k2s2 over 17 positions).
    """
    conv, product, summed, back = plan.chain.convolution, plan.gradients.of_input, plan.gradients.of_weight, _back(plan)
    assert isinstance(product, Gemm)
    assert summed is not None
    is_shared = product.volume.padded == summed.gradient_volume.padded
    packed = input_packing(back, product)(*dv) if needs[0] or is_shared else None
    dx = dw = None
    if needs[1]:
        slopes = packed if packed is not None and is_shared else gradient_packing(summed, plan.value)(*dv)
        inputs = pack_residues(x, back.value, summed.volume, summed.arithmetic, summed.channels)
        dw = product_over_positions(conv, summed, plan.input.shape[0], inputs, slopes, weight)
        del inputs, slopes
    if needs[0]:
        assert packed is not None
        dx, _ = convolve(back, product, packed, (dv.tensor, weight))
    return [dx, dw]


def _back(plan: Plan) -> Plan:
    """The convolution that computes the input's gradient from the result's, as a plan of its own."""
    conv = plan.chain.convolution
    return dataclasses.replace(
        plan,
        chain=Chain(plan.chain.dims, input_gradient_of(conv, plan.input.shape[2:]), (), ("input", "weight")),
        input=plan.value,
        value=dataclasses.replace(plan.input, dtype=plan.value.dtype),
        passes=(Pass("own convolution", 1, 0, Store()),),
        result_dtype=plan.value.dtype,
    )
