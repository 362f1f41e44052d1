"""The problems that a graph's chains will have, read from the graph before it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from postlude.graph.capture import example_of
from postlude.graph.match import Match
from postlude.graph.rows import as_matrices
from postlude.plan import problem_of
from postlude.run.ledger import SiteProblem
from postlude.run.site import Site


def site_problems(
    graph: fx.GraphModule, inputs: Sequence[Any], matches: Sequence[Match], sites: Sequence[Site]
) -> list[SiteProblem | None]:
    """One problem per site; None if a size is not known before the call."""
    wants = wanting_gradients(graph, inputs)
    return [_site_problem(item, site, wants) for item, site in zip(matches, sites)]


def _site_problem(item: Match, site: Site, wants: set[fx.Node]) -> SiteProblem | None:
    values = [example_of(node.meta.get("val")) for node in item.tensors]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    needs = tuple(node in wants and slot not in item.chain.detached for slot, node in enumerate(item.tensors))
    problem = problem_of(as_matrices(item.chain, known), *site.settings)
    return SiteProblem(site.name, site.chain, dataclasses.replace(problem, needs_grad=any(needs)), needs)


def wanting_gradients(graph: fx.GraphModule, inputs: Sequence[Any]) -> set[fx.Node]:
    """Nodes whose value needs a gradient: inputs that require one, and what is computed from them."""
    found: set[fx.Node] = set()
    if not torch.is_grad_enabled():
        return found
    given = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            x = next(given, None)
            if isinstance(x, torch.Tensor) and x.requires_grad:
                found.add(node)
        elif node.target is not torch.ops.aten.detach.default and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found
