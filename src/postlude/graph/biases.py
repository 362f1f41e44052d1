"""The biases of convolutions that PyTorch runs, as additions of the graph.

A compiler saves a convolution's result for the backward pass, with its bias where that is part of the operator. The
bias is then added in a pass of its own, because PyTorch's kernels do not add it and the value has to be written. As an
operator of the graph the addition belongs to whatever reads the value, in both passes: one launch and one reading and
writing of the value less for each convolution.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from postlude.graph import spellings
from postlude.graph.tidy import meta_for_another

aten = torch.ops.aten


def add_apart(graph: fx.GraphModule) -> None:
    """Makes an addition of every bias of a convolution, in the convolution's dtype, as PyTorch adds it."""
    for node in [node for node in graph.graph.nodes if spellings.is_convolution(node)]:
        bias, value = spellings.arguments_of(node)["bias"], node.meta["val"]
        if not isinstance(bias, fx.Node) or not _is_added_later(bias.meta["val"], value):
            continue
        _leave_out(node)
        shape = [1, -1, *[1] * (value.dim() - 2)]
        with graph.graph.inserting_before(node):
            shaped = graph.graph.call_function(aten.reshape.default, (bias, shape))
        with graph.graph.inserting_after(node):
            added = graph.graph.call_function(aten.add.Tensor, (node, shaped))
        node.replace_all_uses_with(added, delete_user_cb=lambda user, added=added: user is not added)
        added.meta, shaped.meta = meta_for_another(node), meta_for_another(bias)
        shaped.meta["val"] = bias.meta["val"].reshape(shape)


def _is_added_later(bias: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether PyTorch adds the bias to the rounded result. On a CPU oneDNN adds it before rounding."""
    return value.is_cuda and bias.dtype == value.dtype


def _leave_out(convolution: fx.Node) -> None:
    names = [argument.name for argument in convolution.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index("bias")
    if place < len(convolution.args):
        convolution.update_arg(place, None)
    else:
        convolution.update_kwarg("bias", None)
