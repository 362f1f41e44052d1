"""Linear layers whose input has more than two axes, such as [B, T, F]: chains of the matrix of their rows.

The graph keeps its axes. Only where a chain is fused do its tensors become matrices, and its result gets the axes back.
A chain that is refused leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from postlude.chain import Chain, Role
from postlude.graph.capture import same_shape

aten = torch.ops.aten
FLATTENED: tuple[Role, ...] = ("input", "full")  # the roles of tensors that have the value's rows


def has_row_axes(chain: Chain, x: torch.Tensor) -> bool:
    """Whether the rows of a chain's input `x` are several axes of it."""
    return chain.is_linear and x.dim() > 2


def as_matrices(chain: Chain, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A chain's tensors with the axes that the chain reads."""
    if not has_row_axes(chain, tensors[0]):
        return list(tensors)
    return [x.flatten(0, -2) if role in FLATTENED else x for x, role in zip(tensors, chain.roles, strict=True)]


def flatten_rows(graph: fx.Graph, chain: Chain, tensors: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes of a chain's tensors, and new ones where a chain reads a matrix. Copies where PyTorch's layer would."""
    made: dict[fx.Node, fx.Node] = {}
    for node, role in zip(tensors, chain.roles, strict=True):
        if role in FLATTENED and node not in made:
            made[node] = graph.call_function(aten.flatten.using_ints, (node, 0, -2))
    return [made[node] if role in FLATTENED else node for node, role in zip(tensors, chain.roles)]


def restore_axes(graph: fx.Graph, result: fx.Node, x: fx.Node, value: torch.Tensor) -> fx.Node:
    """The result of a chain on the rows of `x`, as a view with the shape of `value`. Sizes that are symbols are read
    from `x`.

    An ordinary view, because it shares the version counter with the result, which the backward pass may have saved.
    """
    sizes: list[Any] = [
        size if isinstance(size, int) else graph.call_function(aten.sym_size.int, (x, axis))
        for axis, size in enumerate(value.shape)
    ]
    return graph.call_function(aten.view.default, (result, sizes))


def is_chains_result(node: fx.Node) -> bool:
    """Whether a node is the call of a chain, or the view of it that restores axes."""
    before = node.args[0] if node.target is aten.view.default else node
    return isinstance(before, fx.Node) and before.op == "call_module"


def is_contiguous(value: torch.Tensor) -> bool:
    """Whether a tensor is known to be contiguous. Never adds a guard."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride())):
        if not same_shape((size,), (1,)) and not same_shape((stride,), (expected,)):
            return False
        expected = expected * size
    return True
