"""Max pools in 3-D in a graph that trains: replaced by an operator whose gradient is a gather."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.fx as fx

from postlude.graph import spellings
from postlude.run import pool_gradient as pool_gradient  # defines the operator
from postlude.windows import per_axis


def gather_pool_gradients(graph: fx.GraphModule, wanting: Collection[fx.Node], device: str = "cuda") -> None:
    """Replaces max pools that need a gradient and whose windows lie side by side."""
    for node in graph.graph.nodes:
        if node in wanting and node.target is torch.ops.aten.max_pool3d.default:
            kernel = _kernel_of(node)
            if kernel is not None and node.meta["val"].device.type == device:
                node.args, node.kwargs = (node.args[0], kernel), {}
                node.target = torch.ops.postlude.max_pool3d.default


def _kernel_of(node: fx.Node) -> list[int] | None:
    """The sizes of a pool's windows, if each begins where the one before it ends and all lie inside the value."""
    call = spellings.arguments_of(node)
    kernel, padding, dilation = (per_axis(call[word], 3) for word in ("kernel_size", "padding", "dilation"))
    stride = per_axis(call["stride"] or kernel, 3)
    is_simple = stride == kernel and not any(padding) and set(dilation) == {1} and not call["ceil_mode"]
    return list(kernel) if is_simple and node.meta["val"].dim() == 5 else None
