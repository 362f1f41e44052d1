"""What autocast does to a convolution's input, as an operator of the graph.

Autocast norms in fp32 and convolves in 16 bits: between them lies a cast below the level of this graph. As an operator
of its own it is the last step of the chain before, which then writes 16 bits instead of 32, and no pass reads both.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from postlude.graph import spellings

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


def _is_narrowed(x: fx.Node, dtype: torch.dtype) -> bool:
    """By autocast. An input of the graph has no chain before it."""
    value = x.meta["val"]
    return x.op == "call_function" and value.is_cuda and value.dtype == torch.float32 and dtype.itemsize == 2
