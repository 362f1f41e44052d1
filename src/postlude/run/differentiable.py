"""Gradients that can be differentiated again: by PyTorch's own operators, at eager speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from postlude import reference
from postlude.chain import Chain, Pointwise, Softmax
from postlude.stages.library import without_autocast

# Words whose gradient follows from their value: the gradient as a function of g and the value.
FROM_VALUE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda g, v: torch.ops.aten.threshold_backward(g, v, 0),
    "tanh": torch.ops.aten.tanh_backward,
    "sigmoid": torch.ops.aten.sigmoid_backward,
    "sqrt": lambda g, v: g / (2 * v),
    "reciprocal": lambda g, v: -g * v * v,
    "softmax": lambda g, v: v * (g - (g * v).sum(1, keepdim=True)),
    "log_softmax": lambda g, v: g - v.exp() * g.sum(1, keepdim=True),
}


def differentiable(
    chain: Chain, tensors: Sequence[Tensor], dy: Tensor, needs: Sequence[bool], result: Tensor | None = None
) -> list[Tensor | None]:
    """The gradients of `tensors`. A tensor that was not kept is given as zeros: no gradient depends on it.

    `result` is the chain's result if nothing else was kept. The last step's gradient follows from it, and the gradients
    of the steps before it depend on no value.
    """
    last = chain.steps[-1]
    if result is not None and isinstance(last, Pointwise | Softmax) and last.op in FROM_VALUE:
        dy = FROM_VALUE[last.op](dy, result)
        chain = dataclasses.replace(chain, steps=chain.steps[:-1])
    # A tensor that was not kept becomes a leaf.
    tensors = [t if t.requires_grad or not n else t.detach().requires_grad_() for t, n in zip(tensors, needs)]
    wanted = [t for t, is_needed in zip(tensors, needs) if is_needed]
    with torch.enable_grad(), without_autocast(dy):
        value = reference.evaluate(chain, tensors)
        found = iter(torch.autograd.grad(value, wanted, dy, create_graph=True, allow_unused=True))
    return [next(found) if is_needed else None for is_needed in needs]
