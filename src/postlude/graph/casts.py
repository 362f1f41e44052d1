"""What autocast does to a convolution's input and weight, as operators of the graph.

Autocast norms in fp32 and convolves in 16 bits: between them lies a cast below the level of this graph. As an operator
of its own it is the last step of the chain before, which then writes 16 bits instead of 32, and no pass reads both.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.fx as fx

from postlude.graph import spellings
from postlude.plan.problem import layout_of
from postlude.run import layouts as layouts  # defines the operator

aten = torch.ops.aten


def cast_inputs(graph: fx.GraphModule) -> None:
    """One cast for each convolution, as autocast has: gradients of a value that two of them read are added in fp32."""
    for node in [node for node in graph.graph.nodes if spellings.is_convolution(node)]:
        x, dtype = node.args[0], node.meta["val"].dtype
        if not isinstance(x, fx.Node) or not _is_narrowed(x, dtype):
            continue
        with graph.graph.inserting_before(node):
            cast = graph.graph.call_function(aten.to.dtype, (x, dtype))
        cast.meta = {key: value for key, value in x.meta.items() if key != "in_place"}
        cast.meta["val"] = x.meta["val"].to(dtype)
        node.replace_input_with(x, cast)


def cast_weights(graph: fx.GraphModule, wanting: Collection[fx.Node]) -> None:
    """Of the convolutions that are left to PyTorch, by the operator whose gradient lies as the weight does."""
    for node in [node for node in graph.graph.nodes if spellings.is_convolution(node)]:
        weight, value = node.args[1], node.meta["val"]
        if not isinstance(weight, fx.Node) or weight not in wanting:
            continue
        given = weight.meta["val"]
        if given.dtype != torch.float32 or value.dtype.itemsize != 2 or layout_of(given) == "strided":
            continue
        with graph.graph.inserting_before(node):
            cast = graph.graph.call_function(torch.ops.postlude.weight.default, (weight, value.dtype))
        cast.meta = {key: item for key, item in weight.meta.items() if key != "in_place"}
        cast.meta["val"] = given.to(value.dtype)
        node.args = (node.args[0], cast, *node.args[2:])


def _is_narrowed(x: fx.Node, dtype: torch.dtype) -> bool:
    """By autocast. An input of the graph has no chain before it."""
    value = x.meta["val"]
    return x.op == "call_function" and value.is_cuda and value.dtype == torch.float32 and dtype.itemsize == 2
