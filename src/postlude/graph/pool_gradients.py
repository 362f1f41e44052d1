"""Max pools in 3-D in a graph that trains: replaced by an operator whose gradient is a gather."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.fx as fx

from postlude.graph.pools import windows_of
from postlude.run import pool_gradient as pool_gradient  # defines the operator


def gather_pool_gradients(graph: fx.GraphModule, wanting: Collection[fx.Node], device: str = "cuda") -> None:
    """Replaces max pools that need a gradient and whose windows lie side by side."""
    for node in graph.graph.nodes:
        if node not in wanting or node.target is not torch.ops.aten.max_pool3d.default:
            continue
        value, windows = node.args[0].meta["val"], windows_of(node, 3)
        # Symbolic sizes stay PyTorch's: which positions no window covers would be a guard on them.
        are_known = all(isinstance(size, int) for size in value.shape)
        if value.device.type == device and value.dim() == 5 and are_known and windows and windows.lie_side_by_side:
            node.args, node.kwargs = (node.args[0], list(windows.kernel)), {}
            node.target = torch.ops.postlude.max_pool3d.default
