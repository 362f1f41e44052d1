"""Gradients that can be differentiated again: by PyTorch's own operators, at their speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from postlude import reference
from postlude.chain import Chain, Pointwise, Softmax
from postlude.stages.library import without_autocast

# The words whose gradient is told by their value: that gradient, of g and the value.
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
    """The gradients of `tensors`; one of them that was not kept comes as zeros, which no gradient depends on.

    `result` is the chain's own where nothing else was kept. It tells the last step's gradient; those of the steps
    before depend on no value at all.
    """
    last = chain.steps[-1]
    if result is not None and isinstance(last, Pointwise | Softmax) and last.op in FROM_VALUE:
        dy = FROM_VALUE[last.op](dy, result)
        chain = dataclasses.replace(chain, steps=chain.steps[:-1])
    # What was not kept is a leaf of its own here.
    tensors = [t if t.requires_grad or not n else t.detach().requires_grad_() for t, n in zip(tensors, needs)]
    wanted = [t for t, is_needed in zip(tensors, needs) if is_needed]
    with torch.enable_grad(), without_autocast(dy):
        value = reference.evaluate(chain, tensors)
        found = iter(torch.autograd.grad(value, wanted, dy, create_graph=True, allow_unused=True))
    return [next(found) if is_needed else None for is_needed in needs]
