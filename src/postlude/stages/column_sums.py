"""Sums of a matrix by column, and products of another one's rows with them: the sum of a linear layer's features."""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.plan.problem import power_of_two
from postlude.stages.cuts import accumulator
from postlude.stages.trace import Pointer, Unread, launch

_ROWS, _WIDEST = 8, 512  # of a tile of the sums: a thread has 32 elements in flight
_BY_WARP = 128  # columns: a warp reads 512 bytes of a row, and threads share no column, so rows add up in registers
_PROGRAMS = 512  # at least, where there are rows enough
_PRODUCT_ROWS, _PRODUCT_COLUMNS = 4, 512  # of a tile of the products


def product_with_sums(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x · (the sum of the weight's rows), [N] in float64, and the sums [K] themselves."""
    features, inputs = weight.shape
    each = _rows_per_program(features, inputs)
    chunks = -(-features // each)
    least, most = (torch.empty((chunks, inputs), dtype=weight.dtype, device=x.device) for _ in range(2))
    sums = _sum_columns(weight, None, (least, most), each)
    product = torch.empty(x.shape[:1], dtype=torch.float64, device=x.device)
    launch(
        "column_sums",
        "sums_product_kernel",
        (-(-x.shape[0] // _PRODUCT_ROWS),),
        [x, sums, least, most, product],
        (x.shape[0], inputs, chunks),
        {"BLOCK_ROWS": _PRODUCT_ROWS, "BLOCK_L": min(_PRODUCT_COLUMNS, power_of_two(inputs))},
    )
    return product, sums


def sum_of_multiples(x: Tensor, factors: Tensor) -> Tensor:
    """The sum [K] of the rows of x [N, K], each times its factor, in float64."""
    return _sum_columns(x, factors, None, _rows_per_program(*x.shape))


def means_of_windows(x: Tensor, window: int, count: int) -> Tensor:
    """The mean of every `window` rows of x, `count` of them."""
    means = torch.empty((count, x.shape[1]), dtype=x.dtype, device=x.device)
    _launch(x[: count * window], None, means, None, window, is_sum=False)
    return means


def _rows_per_program(rows: int, columns: int) -> int:
    chunks = -(-_PROGRAMS // -(-columns // _WIDEST))
    return -(-rows // (chunks * _ROWS)) * _ROWS


def _sum_columns(x: Tensor, factors: Tensor | None, extremes: tuple[Tensor, Tensor] | None, each: int) -> Tensor:
    """The sums [K] in float64, from those of chunks of `each` rows."""
    rows, columns = x.shape
    sums = torch.empty((-(-rows // each), columns), dtype=torch.float64, device=x.device)
    _launch(x, factors, sums, extremes, each, is_sum=True)
    return sums.sum(0)


def _launch(
    x: Tensor, factors: Tensor | None, out: Tensor, extremes: tuple[Tensor, Tensor] | None, each: int, is_sum: bool
) -> None:
    (rows, columns), unread = x.shape, Unread(x)
    found: tuple[Pointer, Pointer] = (unread, unread) if extremes is None else extremes
    block = min(_WIDEST, power_of_two(columns))
    launch(
        "column_sums",
        "column_sums_kernel",
        (out.shape[0] * -(-columns // block),),
        [x, unread if factors is None else factors, out, *found],
        (rows, columns, each),
        {
            "IS_SUM": is_sum,
            "HAS_FACTORS": factors is not None,
            "HAS_EXTREMES": extremes is not None,
            "BLOCK_ROWS": _ROWS,
            "BLOCK_L": block,
            "ACC": accumulator(x.dtype if factors is None else torch.float64),
        },
        warps=max(1, block // _BY_WARP),
    )
