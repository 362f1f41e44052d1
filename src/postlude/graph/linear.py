"""Reads a linear layer from the graph as the start of a chain."""

from __future__ import annotations

import torch.fx as fx

from postlude.chain import linear
from postlude.graph import spellings
from postlude.graph.capture import same_shape
from postlude.graph.draft import Draft, cast_to, shape_of, start_with
from postlude.graph.spellings import describe


def start_with_linear(node: fx.Node) -> Draft | str:
    operands = spellings.linear_operands(node)
    assert operands is not None
    x, weight, bias = operands
    if not isinstance(weight, fx.Node) or len(shape_of(weight)) != 2 or len(shape_of(x)) < 2:
        return f"{describe(node)} of anything but rows and the transpose of a weight"
    out_features, in_features = shape_of(weight)
    if not isinstance(out_features, int) or not isinstance(in_features, int):
        return f"{describe(node)} whose weight has no fixed shape"
    if bias is not None and not same_shape(shape_of(bias), (out_features,)):
        return f"{describe(node)} with a bias that is not one number per feature"
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return start_with(linear(in_features, out_features, bias is not None, cast_to(node, tensors)), node, tensors)
