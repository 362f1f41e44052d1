"""Lets Inductor's code call chains as Python functions instead of operators.

On the H200's machine an operator takes 60 to 80 µs of host time before its first launch. Half of that is PyTorch's
dispatcher, which is entered twice. The text that says which program runs is a new string at every call and is hashed
again. Grad mode, autocast and the current device are set, although Inductor's code has set them already. Networks of
many small chains wait for all this.

So Inductor writes another name for the pair of operators, which calls the same program. The graph, PyTorch's caches and
every other tool still see the operators.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from postlude.run.operator_call import read
from postlude.run.operator_passes import KNOWN, Passes, passes

log = logging.getLogger("postlude")
_known = KNOWN.get  # bound once: as a method of an imported name it takes 50 ns longer


def run_forward(tensors: list[Tensor], text: str) -> list[Tensor]:
    known = _known(text)
    if known is None:
        known = _passes(text, tensors[0].device)
    if known is None or profiler._is_profiler_enabled:  # a profiler should see the operator by its name
        found: list[Tensor] = torch.ops.postlude.chain_forward(tensors, text)
        return found
    return known.forward(tensors)


def run_backward(dy: Tensor, saved: list[Tensor], text: str) -> list[Tensor]:
    known = _known(text)
    if known is None:
        known = _passes(text, dy.device)
    if known is None or profiler._is_profiler_enabled:
        found: list[Tensor] = torch.ops.postlude.chain_backward(dy, saved, text)
        return found
    return known.backward(dy, saved)


def _passes(text: str, device: torch.device) -> Passes | None:
    """The passes for a text; None if sizes are known only at a call."""
    return passes(text, device) if read(text).made else None


@functools.cache
def tell_inductor() -> None:
    """Registers the functions with Inductor, before the first graph is compiled. Without this it calls the
    operators."""
    try:
        _tell_inductor()
    except Exception as error:  # Inductor's interfaces are private
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
# The place where Inductor's code finds them, in later processes too.
for _function in (run_forward, run_backward):
    setattr(torch.ops.postlude, _function.__name__, _function)
