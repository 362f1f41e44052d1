"""The GEMM of a linear layer with its epilogue, and the same GEMM for its gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from postlude.chain import Chain, linear
from postlude.plan import Pass, Plan, Store
from postlude.plan.gemm import Arithmetic, padded_channels
from postlude.plan.linear import LinearGemm, gradient_gemm
from postlude.plan.problem import Spec, power_of_two
from postlude.plan.tiles import pass_warps
from postlude.stages.cuts import Partials, accumulator, accumulator_of, is_wide
from postlude.stages.epilogue import Epilogue
from postlude.stages.pack import planes
from postlude.stages.trace import Matrix, Unread, launch, or_unread

_TOGETHER = 16  # tiles along the features in a group: with 8 along the samples, as many as run at once on an H200
_PACK_BLOCK = 4096  # elements of a row that a program packs at a time
_COLUMNS, _COLUMN_BLOCK = 32, 128  # columns of a program, of 128 bytes in a row, and elements of each at a time


class PackedRows(NamedTuple):
    high: Tensor  # [rows, padded features]
    low: Tensor | None
    unscale: Tensor | None  # [rows], the inverse scales


def columns(plan: Plan) -> Plan:
    """The plan of a linear layer as if its value were channels-last: samples are the positions of a single sample, and
    features are its channels. Tensors stay as they are, [N, F], and so does the plan of a convolution."""
    if not plan.chain.is_linear:
        return plan
    rows, features = plan.value.shape
    value = dataclasses.replace(plan.value, shape=(1, features, rows), layout="channels_last")
    return dataclasses.replace(plan, value=value, result_layout="channels_last")


def multiply(plan: Plan, gemm: LinearGemm, tensors: Sequence[Tensor]) -> tuple[Tensor | None, Partials | None]:
    """x · Wᵀ with the epilogue of the plan's first pass."""
    x, weight = (tensor.contiguous() for tensor in tensors[:2])
    return _product(plan, gemm, x, weight, tensors)


def linear_gradients(
    plan: Plan, dv: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight: dv · W and dvᵀ · x, by our GEMM if the layer's was ours."""
    own = plan.own if isinstance(plan.own, LinearGemm) else None
    dv, x, weight = (tensor.contiguous() for tensor in (dv, x, weight))
    dx = dw = None
    if needs[0]:
        dx = torch.mm(dv, weight) if own is None else _multiplied(plan, gradient_gemm(own), dv, weight.t())
    if needs[1]:
        dw = torch.mm(dv.t(), x) if own is None else _multiplied(plan, gradient_gemm(own, packs=True), dv.t(), x.t())
    return dx, dw


def _multiplied(plan: Plan, gemm: LinearGemm, left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ"""
    result, _ = _product(_alone(plan, left, right), gemm, left, right, ())
    assert result is not None
    return result


def _alone(plan: Plan, left: Tensor, right: Tensor) -> Plan:
    """The plan of left · rightᵀ alone."""
    (rows, inner), outputs = left.shape, right.shape[0]
    dtype = plan.value.dtype
    return dataclasses.replace(
        plan,
        chain=Chain(0, linear(inner, outputs), (), ("input", "weight")),
        input=Spec((rows, inner), dtype, "contiguous"),
        value=Spec((rows, outputs), dtype, "contiguous"),
        passes=(Pass("own convolution", 1, 0, Store()),),
        result_dtype=dtype,
    )


def _product(
    plan: Plan, gemm: LinearGemm, x: Tensor, weight: Tensor, tensors: Sequence[Tensor]
) -> tuple[Tensor | None, Partials | None]:
    rows, features = plan.value.shape
    inner = x.shape[1]
    packed = pack_rows(x, gemm.arithmetic)
    left, left_low = _planes(packed, (gemm.rows, gemm.block_k))
    block = (gemm.block_c, gemm.block_k)
    is_turned = gemm.cuts_weight and not weight.is_contiguous()
    if gemm.cuts_weight:
        right, unscale = _in_place(weight, block), None
        right_low: Matrix | Unread = Unread(right)
    else:
        cut = pack_rows(weight, gemm.arithmetic)
        (right, right_low), unscale = _planes(cut, block), cut.unscale
    tiles = -(-rows // gemm.rows)
    end = Epilogue(columns(plan), tiles, gemm.block_c, "[:, None]", stored=(rows, features))
    constants = {
        "STEPS_FN": end.before,
        **planes(gemm.arithmetic),
        "IS_WEIGHT_CUT": gemm.cuts_weight,
        "IS_WEIGHT_TURNED": is_turned,
        **end.written,
        "USES_INT64": is_wide(columns(plan).value),
        **end.channels,
        "BLOCKS_TOGETHER": _TOGETHER,
        "BLOCK_M": gemm.rows,
        "BLOCK_C": gemm.block_c,
        "BLOCK_K": gemm.block_k,
        "STAGES": gemm.stages,
        "ACC": accumulator(accumulator_of(plan.value)),
    }
    product = [left, left_low, right, right_low, or_unread(packed.unscale, x), or_unread(unscale, x)]
    numbers = (features, rows, inner, tiles)
    return end.launch(
        "linear", "linear_kernel", (end.programs,), product, packed.high, tensors, numbers, constants, gemm.warps
    )


def pack_rows(x: Tensor, arithmetic: Arithmetic) -> PackedRows:
    """The planes of a matrix, each row with its own scale; rows are padded with zeros to a multiple of 16.

    A matrix that lies transposed is packed as it lies: PyTorch's copy of 32768² numbers takes 13 ms on an H200.
    """
    (rows, inner), dtype = x.shape, getattr(torch, arithmetic.operands)
    padded = padded_channels(inner)
    high = torch.empty((rows, padded), dtype=dtype, device=x.device)
    low = torch.empty_like(high) if arithmetic.planes == 2 else None
    unscale = torch.empty(rows, dtype=torch.float32, device=x.device) if arithmetic.scaled else None
    written = [high, or_unread(low, high), or_unread(unscale, high)]
    if x.is_contiguous():
        block = min(_PACK_BLOCK, power_of_two(padded))
        constants = {**planes(arithmetic), "BLOCK_K": block}
        warps = pass_warps(block, 8, 8)
        launch("linear", "pack_rows_kernel", (rows,), [x, *written], (inner, padded), constants, warps)
    else:
        constants = {**planes(arithmetic), "BLOCK_ROWS": _COLUMNS, "BLOCK_K": _COLUMN_BLOCK}
        numbers = (rows, inner, padded)
        grid = (-(-rows // _COLUMNS),)
        launch("linear", "pack_columns_kernel", grid, [x.t(), *written], numbers, constants, 8)
    return PackedRows(high, low, unscale)


def _in_place(weight: Tensor, block: tuple[int, int]) -> Matrix:
    """A weight [features, inner], or its transpose if that is how it lies."""
    features, inner = weight.shape
    if weight.is_contiguous():
        return Matrix(weight, (features, inner), (inner, 1), block)
    return Matrix(weight.t(), (inner, features), (features, 1), (block[1], block[0]))


def _planes(packed: PackedRows, block: tuple[int, int]) -> tuple[Matrix, Matrix | Unread]:
    rows, padded = packed.high.shape
    high = Matrix(packed.high, (rows, padded), (padded, 1), block)
    return high, Unread(high) if packed.low is None else high._replace(base=packed.low)
