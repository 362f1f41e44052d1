"""Replaces the nodes of each chain by one call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.fx as fx

from postlude.code_hash import source_digest
from postlude.graph.match import Match
from postlude.graph.rows import flatten_rows, has_row_axes, restore_axes
from postlude.graph.tidy import meta_for_another
from postlude.run.site import Site


def splice(graph: fx.GraphModule, matches: list[Match], sites: list[Site]) -> None:
    """Replaces each match by a call of its site. The graph holds chains; plans are looked up at call time."""
    replaced: dict[fx.Node, fx.Node] = {}
    for number, (found, site) in enumerate(zip(matches, sites)):
        target = f"chain_{number}"
        graph.add_module(target, site)
        last = found.nodes[-1]
        tensors = [replaced.get(node, node) for node in found.tensors]
        with graph.graph.inserting_before(last):
            result = _called(graph.graph, target, found, tensors)
        last.replace_all_uses_with(result)
        replaced[last] = result
        for node in reversed(found.nodes):
            graph.graph.erase_node(node)


def _called(graph: fx.Graph, target: str, found: Match, tensors: list[fx.Node]) -> fx.Node:
    """The node with the result of a new call. Tensors of more axes than the chain has are matrices for the call."""
    x, about = tensors[0], meta_for_another(found.nodes[-1])
    is_of_rows = has_row_axes(found.chain, x.meta["val"])
    given = flatten_rows(graph, found.chain, tensors) if is_of_rows else tensors
    call = graph.call_module(target, tuple(given))
    call.meta = dict(about)
    if not is_of_rows:
        return call
    result = restore_axes(graph, call, x, about["val"])
    result.meta = about
    call.meta.pop("val")
    return result


def use_operator(graph: fx.GraphModule, fused: Sequence[tuple[Site, object]]) -> None:
    """Turns the calls of sites into calls of the registered operator, which Inductor can trace through.

    Each call carries a hash of the code and of its plan, because PyTorch caches compiled graphs across processes by
    their content.
    """
    known = {f"chain_{number}": pair for number, pair in enumerate(fused)}
    for node in list(graph.graph.nodes):
        if node.op != "call_module" or node.target not in known:
            continue
        site, plan = known[node.target]
        slots = list(enumerate(node.args))
        still = [value for slot, value in slots if slot not in site.chain.moved]
        moved = [value for slot, value in slots if slot in site.chain.moved]
        settings = (site.chain.dumps(), *site.settings, _code(plan))
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function(torch.ops.postlude.chain.default, (still, moved, *settings))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.graph.erase_node(node)
    graph.delete_all_unused_submodules()


def _code(plan: object) -> str:
    return hashlib.sha256(f"{source_digest()} {plan!r}".encode()).hexdigest()[:16]
