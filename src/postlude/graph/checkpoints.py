"""Activation checkpoints in a graph that runs operator by operator.

Dynamo writes torch.utils.checkpoint as an operator that is meant for Inductor, which draws random numbers from seeds of
its own. Run as it is, it recomputes without the generator's state of the first time: dropout then has another mask in
the backward pass than in the forward pass, and gradients are wrong.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch._higher_order_ops.wrap import TagActivationCheckpoint, tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint


def keep_random_state(graph: fx.GraphModule) -> None:
    """Makes checkpoints, and those inside of them, what they are in eager PyTorch."""
    for module in graph.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        nodes = module.graph.find_nodes(op="call_function", target=tag_activation_checkpoint)
        for node in nodes:
            node.target = _checkpointed
        if nodes:
            module.recompile()


def _checkpointed(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    asked, given = TagActivationCheckpoint.divide_kwargs(kwargs)
    if "_checkpoint_context_fn" in body.meta:  # selective: some results are kept
        asked["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **given, **{**asked, "use_reentrant": False})
