"""Norms that are not fused between channels-last convolutions: replaced by an operator that keeps the layout."""

from __future__ import annotations

import torch
import torch.fx as fx

from postlude.graph import spellings
from postlude.plan.problem import layout_of
from postlude.run import layouts as layouts  # defines the operator

_COMPUTED = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # as PyTorch's kernels do


def keeps_layout(node: fx.Node) -> bool:
    """Whether `node` is a norm of a channels-last value that the operator can compute."""
    if node.op != "call_function" or spellings.norm(node) not in ("group_norm", "instance_norm"):
        return False
    call = spellings.arguments_of(node)
    x = call["input"].meta.get("val")
    if call.get("running_mean") is not None or not call.get("use_input_stats", True):
        return False
    return isinstance(x, torch.Tensor) and x.dim() > 3 and layout_of(x) == "channels_last"


def keep_layouts(graph: fx.GraphModule) -> None:
    """Replaces every remaining norm whose result should be channels-last."""
    for node in graph.graph.nodes:
        if not keeps_layout(node) or layout_of(node.meta["val"]) != "channels_last":
            continue
        call = spellings.arguments_of(node)
        dtype, given = node.meta["val"].dtype, call["input"].meta["val"]
        groups = call["num_groups"] if "num_groups" in call else given.shape[1]
        computed = _COMPUTED.get(dtype, dtype)
        node.args = (call["input"], call["weight"], call["bias"], groups, call["eps"], computed, dtype)
        node.kwargs, node.target = {}, torch.ops.postlude.norm.default
