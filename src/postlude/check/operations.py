"""Counts the floating-point operations of products."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from postlude.check.interception import Interception


class Operations(Interception):
    """Counts the operations of products and convolutions that run inside, by PyTorch's formulas.

    `FlopCounterMode` also says in which module they run. Its hooks on all modules reach models in other threads, whose
    `autograd.grad` then raises.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.count += int(formula(*args, **kwargs, out_val=result))
        return result
