"""Random numbers and new tensors of a model's own, the same in float64 as in the model's dtype.

PyTorch's generators give other numbers for another dtype, so a reference that draws some would differ from its float64
copy by all of them, and that difference would pass for PyTorch's error. A tensor that the reference makes without a
dtype, such as the first state of an LSTM, would be float32, which no product with float64 accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from postlude.check.interception import Interception

_aten = torch.ops.aten
_MADE = frozenset({_aten.randn, _aten.rand, _aten.randn_like, _aten.rand_like})
_FILLED = frozenset(
    {_aten.normal_, _aten.uniform_, _aten.exponential_, _aten.cauchy_, _aten.log_normal_, _aten.geometric_}
)


class SameDraws(Interception):
    """Draws float64 tensors in `dtype`; new tensors without a dtype become float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packet = getattr(func, "overloadpacket", None)
        if packet in _MADE and _wanted(args, kwargs) == torch.float64:
            return func(*args, **{**kwargs, "dtype": self.dtype}).double()
        if packet in _FILLED and args[0].dtype == torch.float64:
            drawn = func(torch.empty_like(args[0], dtype=self.dtype), *args[1:], **kwargs)
            return args[0].copy_(drawn)
        result = func(*args, **kwargs)
        is_new = kwargs.get("dtype") is None and not any(isinstance(one, Tensor) for one in tree_leaves(args))
        return result.double() if is_new and isinstance(result, Tensor) and result.is_floating_point() else result


def _wanted(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype:
    given = kwargs.get("dtype")
    if isinstance(given, torch.dtype):
        return given
    return args[0].dtype if isinstance(args[0], Tensor) else torch.get_default_dtype()
