"""Reads a norm over a linear layer's features that is written as an instance_norm, with features as positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from postlude.graph import spellings
from postlude.graph.spellings import arguments_of

aten = torch.ops.aten


@dataclass(frozen=True)
class ComposedNorm:
    """A norm that a graph has as several operators."""

    op: str
    eps: float
    operand: fx.Node
    nodes: tuple[fx.Node, ...]  # the last one holds the values


def read_row_norm(first: fx.Node) -> ComposedNorm | None:
    """The norm that begins with node `first`, or None.

    [N, F] → [N, 1, …, F] → instance_norm without affine → [N, F] equals layer_norm without weight and bias.
    """
    nodes: list[fx.Node] = []
    node: fx.Node | None = first
    while node is not None and _adds_an_axis(node):
        nodes.append(node)
        node = only_user(node)
    added = len(nodes)
    if node is None or not added or spellings.norm(node) != "instance_norm":
        return None
    call = arguments_of(node)
    if not call["use_input_stats"] or any(call[name] is not None for name in ("weight", "bias", "running_mean")):
        return None
    for _ in range(added):
        nodes.append(node)
        node = only_user(node)
        if node is None or node.target is not aten.squeeze.dim or arguments_of(node)["dim"] != 1:
            return None
    return ComposedNorm("layer_norm", float(call["eps"]), arguments_of(first)["self"], (*nodes, node))


def _adds_an_axis(node: fx.Node) -> bool:
    """Whether a node inserts an axis after the first one."""
    return node.target is aten.unsqueeze.default and arguments_of(node)["dim"] == 1


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
