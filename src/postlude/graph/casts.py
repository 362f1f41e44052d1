"""Autocast's casts of a convolution's input and weight, as operators of the graph.

Autocast computes norms in fp32 and convolutions in 16 bits. The cast between them is below the level of this graph. As
an operator it becomes the last step of the chain before it, which then writes 16 bits, and the separate pass that would
read 32 bits and write 16 is gone.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
import torch.fx as fx

from postlude.graph import spellings
from postlude.graph.tidy import meta_for_another
from postlude.plan.problem import layout_of
from postlude.run import layouts as layouts  # defines the operator

aten = torch.ops.aten


def cast_inputs(graph: fx.GraphModule) -> None:
    """Adds one cast per convolution, as autocast does: if two read one value, its gradients are added in fp32."""
    for node in [node for node in graph.graph.nodes if spellings.is_convolution(node)]:
        x, dtype = node.args[0], node.meta["val"].dtype
        if not isinstance(x, fx.Node) or not _is_narrowed(x, dtype):
            continue
        with graph.graph.inserting_before(node):
            cast = graph.graph.call_function(aten.to.dtype, (x, dtype))
        cast.meta = meta_for_another(x)
        cast.meta["val"] = x.meta["val"].to(dtype)
        node.replace_input_with(x, cast)


def cast_weights(graph: fx.GraphModule, wanting: Collection[fx.Node]) -> None:
    """Casts the weights of convolutions left to PyTorch, by one operator for all weights of a dtype."""
    by_dtype: dict[torch.dtype, dict[fx.Node, list[fx.Node]]] = {}  # weights, and the convolutions that read each
    for node in [node for node in graph.graph.nodes if spellings.is_convolution(node)]:
        weight, dtype = node.args[1], node.meta["val"].dtype
        if isinstance(weight, fx.Node) and weight.op == "placeholder" and _is_cast(weight.meta["val"], dtype):
            by_dtype.setdefault(dtype, {}).setdefault(weight, []).append(node)
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for dtype, readers in by_dtype.items():
        # Where none of them wants a gradient, no graph of autograd's is made for any.
        for weights in ([w for w in readers if w in wanting], [w for w in readers if w not in wanting]):
            if weights:
                _cast_together(graph, first, weights, readers, dtype)


def _is_cast(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    return weight.dtype == torch.float32 and dtype.itemsize == 2 and layout_of(weight) != "strided"


def _cast_together(
    graph: fx.GraphModule,
    first: fx.Node,
    weights: list[fx.Node],
    readers: dict[fx.Node, list[fx.Node]],
    dtype: torch.dtype,
) -> None:
    with graph.graph.inserting_before(first):
        together = graph.graph.call_function(torch.ops.postlude.weights.default, (weights, dtype))
        together.meta["val"] = [weight.meta["val"].to(dtype) for weight in weights]
        for place, weight in enumerate(weights):
            cast = graph.graph.call_function(operator.getitem, (together, place))
            cast.meta = meta_for_another(weight)
            cast.meta["val"] = together.meta["val"][place]
            for node in readers[weight]:
                node.args = (node.args[0], cast, *node.args[2:])


def _is_narrowed(x: fx.Node, dtype: torch.dtype) -> bool:
    """Whether autocast casts `x` to fewer bits. Not for an input of the graph, because no chain precedes it."""
    value = x.meta["val"]
    return x.op == "call_function" and value.is_cuda and value.dtype == torch.float32 and dtype.itemsize == 2
