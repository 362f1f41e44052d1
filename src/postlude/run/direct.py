"""Chains as Inductor's code calls them: a Python function instead of an operator.

An operator costs the host 60 to 80 µs before its first launch on the machine of the H200 that was measured. PyTorch's
dispatcher is entered twice, which takes half of that. The text that says which program runs arrives as a new string
each time, and its hash is computed anew. Grad mode, autocast and the current device are set, although the code that
Inductor writes has set them. Networks of many small chains wait for all this.

So Inductor prints another name for the pair of operators. It calls the same program. The graph, PyTorch's caches of it
and every other tool see the operators.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from postlude.run.operator_call import read
from postlude.run.passes import Passes, passes

log = logging.getLogger("postlude")
_KNOWN: dict[str, Passes] = {}  # by text, which names the device too


def run_forward(tensors: list[Tensor], text: str) -> list[Tensor]:
    known = _KNOWN.get(text)
    if known is None:
        known = _passes(text, tensors[0].device)
    if known is None or profiler._is_profiler_enabled:  # a profiler is shown the operator by its name
        found: list[Tensor] = torch.ops.postlude.chain_forward(tensors, text)
        return found
    return known.forward(tensors)


def run_backward(dy: Tensor, saved: list[Tensor], text: str) -> list[Tensor]:
    known = _KNOWN.get(text)
    if known is None:
        known = _passes(text, dy.device)
    if known is None or profiler._is_profiler_enabled:
        found: list[Tensor] = torch.ops.postlude.chain_backward(dy, saved, text)
        return found
    return known.backward(dy, saved)


def _passes(text: str, device: torch.device) -> Passes | None:
    """None where sizes are known only at a call."""
    if not read(text).made:
        return None
    return _KNOWN.setdefault(text, passes(text, device))


@functools.cache
def tell_inductor() -> None:
    """Before the first graph is compiled. Without it the operators are called as any others are."""
    try:
        _tell_inductor()
    except Exception as error:  # Inductor's insides are private
        log.debug("Inductor calls chains through PyTorch's dispatcher (%s: %s)", type(error).__name__, error)


def _tell_inductor() -> None:
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V
    from torch.utils import _pytree as pytree

    class ChainKernel(ir.FallbackKernel):
        def codegen(self, wrapper: Any) -> None:
            if not V.graph.cpp_wrapper:
                self.python_kernel_name = _NAMES[str(self.op_overload)]
            super().codegen(wrapper)

    def wrapped(node: Any) -> Any:
        if not isinstance(node, ir.IRNode):
            return node
        return node.wrap_for_lowering() if hasattr(node, "wrap_for_lowering") else ir.TensorBox.create(node)

    def lowered(operator: Any) -> Any:
        def handler(*args: Any) -> Any:
            return pytree.tree_map(wrapped, ChainKernel.create(operator, *args))

        handler._is_fallback_handler = True  # type: ignore[attr-defined]
        return handler

    for operator in (torch.ops.postlude.chain_forward.default, torch.ops.postlude.chain_backward.default):
        lowering.make_fallback(operator, layout_constraint=lowering.constrain_to_fake_tensors, warn=False)
        lowering.register_lowering(operator, type_promotion_kind=None)(lowered(operator))


_NAMES = {
    "postlude.chain_forward.default": "torch.ops.postlude.run_forward",
    "postlude.chain_backward.default": "torch.ops.postlude.run_backward",
}
# Where the code that Inductor writes finds them, in a later process too.
for _function in (run_forward, run_backward):
    setattr(torch.ops.postlude, _function.__name__, _function)
