"""Which regions of a graph are worth being channels-last.

A region is a set of convolutions, chains and nodes between them, connected by channels-last values. It costs one
conversion for each value that enters or leaves it. It saves the conversions inside cuDNN's convolutions, and part of
the packing before ours: on an H200 our 16-bit convolutions take 10 to 14 % less time with channels-last values, which
is half of what converting both ends costs. With fp32 operands, which are packed in any case, they gain nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from postlude.graph import spellings
from postlude.graph.match import Match
from postlude.plan import Plan
from postlude.plan.problem import layout_of


def unpaid(
    graph: fx.GraphModule, conversions: Sequence[fx.Node], plans: Mapping[Match, Plan | None], before: Sequence[Any]
) -> list[fx.Node]:
    """The conversions into regions that save less than they cost.

    `plans` are those of the fused chains, `before` the graph's results before any conversion.
    """
    regions = _Regions(graph, plans)
    trains = any(plan is not None and plan.trains for plan in plans.values())
    balance = Counter[fx.Node]()
    for node in (*(node for node in conversions if _changes(node)), *_leaving(graph, before)):
        balance[regions.of(node)] -= _bytes(node) * (2 if trains else 1)  # its gradient is converted back
    by_node = {node: plan for item, plan in plans.items() for node in item.nodes}
    for node in graph.graph.nodes:
        if spellings.is_convolution(node):
            balance[regions.of(node)] += int(_saved(node, by_node.get(node), trains))
    return [node for node in conversions if balance[regions.of(node)] < 0]


def withdraw(conversions: Sequence[fx.Node]) -> None:
    """Makes conversions do nothing. They stay in the graph, because chains are identified by the nodes that they
    read."""
    for node in conversions:
        node.kwargs = {"memory_format": torch.contiguous_format}


def _is_last(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and layout_of(value) == "channels_last"


class _Regions:
    """Disjoint sets of nodes (union-find), each identified by one of its nodes."""

    def __init__(self, graph: fx.GraphModule, chains: Mapping[Match, Any]) -> None:
        self.parents: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if _is_last(node):
                for given in node.all_input_nodes:
                    if _is_last(given):
                        self._join(node, given)
        for item in chains:  # values inside a chain do not count
            if _is_last(item.tensors[0]):
                for node in item.nodes:
                    self._join(node, item.tensors[0])

    def of(self, node: fx.Node) -> fx.Node:
        while (parent := self.parents.get(node, node)) is not node:
            node = parent
        return node

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        self.parents[self.of(one)] = self.of(other)


def _changes(conversion: fx.Node) -> bool:
    given = conversion.args[0]
    assert isinstance(given, fx.Node)
    return bool(given.meta["val"].stride() != conversion.meta["val"].stride())


def _leaving(graph: fx.GraphModule, before: Sequence[Any]) -> Iterator[fx.Node]:
    """Nodes whose value the graph returns and which must be contiguous, as before."""
    for node, was in zip(graph.graph.output_node().all_input_nodes, before, strict=True):
        if _is_last(node) and was.is_contiguous():
            yield node


def _saved(convolution: fx.Node, plan: Plan | None, trains: bool) -> float:
    """Bytes that are not converted because the convolution's input and result are channels-last."""
    x = convolution.args[0]
    assert isinstance(x, fx.Node)
    both = _bytes(x) + _bytes(convolution)
    if plan is None or plan.own is None:
        return float(both * (3 if trains else 1))  # forward, and in both gradients
    gradients = 0
    if trains and plan.gradients.of_both is None:
        gradients = (plan.gradients.of_input is None) + (plan.gradients.of_weight is None)
    packs_less = convolution.meta["val"].element_size() == 2
    return float(both * (0.5 * packs_less + gradients))


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
