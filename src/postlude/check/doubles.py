"""Fast float64 convolutions on a GPU.

On an H200 cuDNN's float64 reaches 4 to 15 TFLOP/s in forward convolutions, but only 1 to 3 in gradients. So an input's
gradient, and a transposed convolution, is computed as the equivalent forward convolution, and a weight's gradient as
one matrix product per tap. All of it is float64; only the order of summation differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.check.interception import Interception

_aten = torch.ops.aten
_CHUNK = 4096  # positions over which one product of a batched product sums


class FastDoubles(Interception):
    """Replaces float64 convolutions with one group, stride 1 and no dilation; everything else runs as before."""

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten.convolution.default and _is_plain(args[0], args[1], *args[3:9]) and args[6]:
            x, weight, bias, _, padding = args[:5]
            return as_forward(x, weight, padding, bias)
        if func is _aten.convolution_backward.default and _is_plain(args[0], args[2], *args[4:10]):
            return gradients(*args)
        return func(*args, **kwargs)


def _is_plain(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, _: bool, more: Any, groups: int
) -> bool:
    is_simple = groups == 1 and set(stride) == set(dilation) == {1} and not any(more)
    return x.dtype == torch.float64 and is_simple and all(p < k for p, k in zip(padding, weight.shape[2:]))


def as_forward(x: Tensor, weight: Tensor, padding: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """A transposed convolution of stride 1 as an ordinary one with its taps flipped."""
    axes = tuple(range(2, weight.dim()))
    turned = weight.transpose(0, 1).flip(axes)
    reach = [k - 1 - p for k, p in zip(weight.shape[2:], padding)]
    return _convolve(x, turned, bias, reach)


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    _bias: Any,
    _stride: Any,
    padding: Sequence[int],
    _dilation: Any,
    transposed: bool,
    _more: Any,
    _groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same as `aten.convolution_backward`."""
    dx = dw = db = None
    if wanted[0]:
        dx = _convolve(dy, weight, None, padding) if transposed else as_forward(dy, weight, padding)
    if wanted[1]:
        # In a transposed convolution x and dy swap roles.
        dw = by_taps(dy, x, weight, padding) if transposed else by_taps(x, dy, weight, padding)
    if wanted[2]:
        db = dy.sum([0, *range(2, dy.dim())])
    return dx, dw, db


def by_taps(x: Tensor, dy: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    """The weight's gradient [channels of dy, channels of x, taps]: for each tap, the product over positions of dy and
    x shifted by the tap."""
    padded = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
    left, out = _in_chunks(dy), dy.shape[2:]
    result = torch.empty_like(weight)
    for tap in itertools.product(*map(range, weight.shape[2:])):
        where = (slice(None), slice(None), *(slice(start, start + size) for start, size in zip(tap, out)))
        shifted = _in_chunks(padded[where])
        place: tuple[slice | int, ...] = (slice(None), slice(None), *tap)
        result[place] = torch.bmm(left, shifted.mT).sum(0)
    return result


def _in_chunks(value: Tensor) -> Tensor:
    """The value as [pieces, channels, positions of a piece]; the last piece of a sample is padded with zeros."""
    flat = value.flatten(2)
    chunk = min(_CHUNK, flat.shape[2])
    flat = F.pad(flat, [0, -flat.shape[2] % chunk])
    return flat.view(*flat.shape[:2], -1, chunk).transpose(1, 2).flatten(0, 1)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    ones, zeros = [1] * len(padding), [0] * len(padding)
    result: Tensor = _aten.convolution(x, weight, bias, ones, list(padding), ones, False, zeros, 1)
    return result
