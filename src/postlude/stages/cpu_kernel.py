"""What the texts of the CPU's kernels have in common: dtypes, operands, and the steps before a norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Chain, Value
from postlude.expressions import Function
from postlude.plan import Plan
from postlude.plan.problem import memory_format
from postlude.steps import forward

TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half"}
_ROLES = {"full": "FULL", "channel": "CHANNEL", "row": "ROW", "one": "ONE"}


def operand_types(chain: Chain, slots: Sequence[int], tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"Operand<{TYPES[tensors[slot].dtype]}, {_ROLES[chain.roles[slot]]}>" for slot in slots)


def operands(plan: Plan, slots: Sequence[int], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors that the steps read, in the value's layout."""
    full = memory_format(plan.value.layout, plan.chain.dims)
    forms = {slot: full if plan.chain.roles[slot] == "full" else torch.contiguous_format for slot in slots}
    return {f"t{slot}": tensors[slot].contiguous(memory_format=form) for slot, form in forms.items()}


def before(chain: Chain, last: int) -> Function:
    """What a norm or a reduction is of: the value itself where no step precedes it."""
    return forward(chain, "before", last, 1) if last else Function("before", (Value(0),), (), Value(0), ())
