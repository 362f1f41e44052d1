"""What all generated CPU kernels have in common: dtypes, operands, and the steps before a norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from postlude.chain import Chain, Reduce, Value
from postlude.emit_cpp import emit_cpp_end
from postlude.expressions import Function
from postlude.plan import Plan
from postlude.plan.problem import memory_format
from postlude.steps import forward, moments, pass_slots

TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half"}
_ROLES = {"full": "FULL", "channel": "CHANNEL", "bias": "CHANNEL", "row": "ROW", "one": "ONE"}


class End(NamedTuple):
    """The end of a chain that needs only moments: steps from `first` to the reduction, which is step `last`."""

    first: int
    last: int
    reduce: Reduce

    def text(self, chain: Chain, dtype: torch.dtype, slots: Sequence[int]) -> str:
        return emit_cpp_end(moments(chain, self.first, self.last), TYPES[dtype], slots)


def end_of(chain: Chain, first: int) -> End:
    steps = enumerate(chain.steps[first - 1 :], first)
    return next(End(first, number, step) for number, step in steps if isinstance(step, Reduce))


def operand_types(chain: Chain, slots: Sequence[int], tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"Operand<{TYPES[tensors[slot].dtype]}, {_ROLES[chain.roles[slot]]}>" for slot in slots)


def operands(plan: Plan, slots: Sequence[int], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors that the steps read, in the value's layout."""
    full = memory_format(plan.value.layout, plan.chain.dims)
    forms = {slot: full if plan.chain.roles[slot] == "full" else torch.contiguous_format for slot in slots}
    return {f"t{slot}": tensors[slot].contiguous(memory_format=form) for slot, form in forms.items()}


def first_step(plan: Plan) -> int:
    """0 if the passes begin with the convolution's bias. oneDNN starts its sums with the bias, and each addition then
    rounds at the bias's size: 2 to 4 times the error of PyTorch's other library, which adds the bias last."""
    return 0 if plan.trains or plan.library == "direct" else 1


def before(chain: Chain, last: int, first: int) -> Function:
    """The steps before a norm or reduction, as a function; the identity if there are none."""
    slots = pass_slots(chain, last, first)
    return forward(chain, "before", last, first) if last or slots else Function("before", (Value(0),), (), Value(0), ())
