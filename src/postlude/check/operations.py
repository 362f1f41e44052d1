"""Counts the floating-point operations of products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Operations(TorchDispatchMode):
    """Counts the operations of products and convolutions that run inside, by PyTorch's formulas.

    `FlopCounterMode` also says in which module they run. Its hooks on all modules reach models in other threads, whose
    `autograd.grad` then raises.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        result = operator(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(operator, "overloadpacket", None))
        if formula is not None:
            self.count += int(formula(*args, **(kwargs or {}), out_val=result))
        return result
