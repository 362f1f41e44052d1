"""Puts a call of each chain where its nodes were."""

from __future__ import annotations

import torch
import torch.fx as fx

from postlude.graph.match import Match
from postlude.run.site import Site


def splice(graph: fx.GraphModule, matches: list[Match], sites: list[Site]) -> None:
    """Replaces each match by a call of its site; the graph holds chains, plans are looked up at call time."""
    replaced: dict[fx.Node, fx.Node] = {}
    for number, (found, site) in enumerate(zip(matches, sites)):
        target = f"chain_{number}"
        graph.add_module(target, site)
        last = found.nodes[-1]
        tensors = tuple(replaced.get(node, node) for node in found.tensors)
        with graph.graph.inserting_before(last):
            call = graph.graph.call_module(target, tensors)
        call.meta = {key: value for key, value in last.meta.items() if key != "in_place"}
        last.replace_all_uses_with(call)
        replaced[last] = call
        for node in reversed(found.nodes):
            graph.graph.erase_node(node)


def use_operator(graph: fx.GraphModule, site_calls: dict[str, Site]) -> None:
    """Turns the sites' calls into calls of the registered operator, which Inductor can look through."""
    for node in list(graph.graph.nodes):
        site = site_calls.get(node.target) if node.op == "call_module" else None
        if site is None:
            continue
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function(
                torch.ops.postlude.chain.default, (list(node.args), site.chain.dumps(), site.precision)
            )
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.graph.erase_node(node)
