"""By how much the largest element of each max_pool window leads: by rounding another one may win."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.windows import Windows, per_axis

MAX_POOLS = {f"max_pool{dims}d{end}": dims for dims in (2, 3) for end in ("", "_with_indices")}
_ARGUMENTS = {"kernel_size": None, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}


def ahead_of_the_second(name: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> Tensor | None:
    """The lead in each window, in the shape of the pool's result; None if the call is not supported."""
    x, dims = args[0].detach(), MAX_POOLS[name]
    call = {**_ARGUMENTS, **given, **dict(zip(_ARGUMENTS, args[1:]))}
    if x.dim() != dims + 2 or any(size != 1 for size in per_axis(call["dilation"], dims)):
        return None
    kernel, padding = per_axis(call["kernel_size"], dims), per_axis(call["padding"], dims)
    stride = per_axis(call["stride"], dims) if call["stride"] else kernel
    windows = Windows(kernel, stride, padding, bool(call["ceil_mode"]))
    if windows.taps < 2:
        return None
    sizes = windows.output_space(tuple(x.shape[2:]))
    # Last axis first, as F.pad expects; ceil_mode needs positions past the padding.
    ends = [(n - 1) * s + k - p for n, s, k, p in zip(sizes, stride, kernel, padding)]
    amounts = [(p, max(0, end - size)) for p, end, size in zip(padding, ends, x.shape[2:])]
    x = F.pad(x, [amount for both in reversed(amounts) for amount in both], value=-float("inf"))
    for axis in range(dims):
        x = x.unfold(2 + axis, kernel[axis], stride[axis]).narrow(2 + axis, 0, sizes[axis])
    best = x.flatten(2 + dims).topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


@dataclass(frozen=True)
class Holding:
    """For one call of a max_pool: the windows that contain an element of a mask."""

    pool: Callable[..., Any]
    how: tuple[Any, ...]
    given: Mapping[str, Any]
    shape: torch.Size  # of what is pooled

    def __call__(self, mask: Tensor) -> Tensor:
        found = self.pool(mask.double(), *self.how, **self.given)
        values: Tensor = found[0] if isinstance(found, tuple) else found
        return values > 0.5
