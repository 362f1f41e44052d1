"""Which chains of a graph are fused, and which values are channels-last: decided with the whole graph in view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from postlude.amounts import shown_bytes
from postlude.chain import Chain, Normalize
from postlude.graph.expected import site_problems
from postlude.graph.layout import propagate, raise_if_unsuited
from postlude.graph.match import Match
from postlude.graph.regions import unpaid, withdraw
from postlude.hardware import machine_for
from postlude.plan import Plan
from postlude.plan.barriers import first_barrier
from postlude.run.ledger import Entry, Ledger, SiteProblem
from postlude.run.site import Site


@dataclass(frozen=True)
class Decided:
    """The decision for a graph, from plans only: nothing has been compiled or checked."""

    sites: list[Site]  # one for each chain
    problems: dict[Match, SiteProblem]  # for chains whose sizes are known
    refused: set[Match]
    conversions: list[fx.Node]  # the remaining conversions to channels-last


def decide(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    chains: Sequence[Match],
    conversions: list[fx.Node],
    before: Sequence[Any],
    site_for: Callable[[Match, str], Site],
    ledger: Ledger,
    refused: set[Match],
    by_inductor: bool,
    has_graphs: bool,
) -> Decided:
    """Decides until nothing changes: a refused chain, or a region that is not worth its conversions, may change the
    layout that other chains read, and with it their plans.

    `before` are the graph's results before any conversion, `refused` the chains that are known to be refused.
    `has_graphs` says that CUDA graphs will replay the launches, so that host time does not count.
    """
    while True:
        handing_on = propagate(graph, [item for item in chains if item not in refused]) if conversions else set()
        sites = [site_for(item, "channels_last" if item in handing_on else "") for item in chains]
        found = zip(chains, site_problems(graph, inputs, chains, sites))
        problems = {item: asked for item, asked in found if asked is not None}
        ours = {node for item in chains if item not in refused for node in item.nodes}
        entries = {
            item: _entry(ledger, asked, around(item.nodes[-1], ours, has_graphs) if by_inductor else None)
            for item, asked in problems.items()
        }
        now = {item for item, entry in entries.items() if entry is not None and entry.is_left_to_pytorch}
        if conversions and not now <= refused:
            refused = refused | now
            continue
        wasted = unpaid(graph, conversions, _plans(entries, refused), before) if conversions else []
        if not wasted:
            raise_if_unsuited(graph, before)  # before anything is compiled or checked
            return Decided(sites, problems, refused | now, conversions)
        withdraw(wasted)
        conversions = [node for node in conversions if node not in wasted]
        if not conversions:
            propagate(graph, [])


@dataclass(frozen=True)
class Around:
    """What is known of a chain's surroundings in a graph that Inductor compiles."""

    has_graphs: bool
    is_cast: bool  # autocast casts the result; the cast for a single reader is the chain's own last step
    is_summed: bool  # all that reads the result are sums that Inductor computes


def around(result: fx.Node, ours: set[fx.Node], has_graphs: bool) -> Around:
    """The surroundings of the chain with this result; `ours` are the nodes of all chains that may be fused."""
    aten = torch.ops.aten
    laid_out = [reader for reader in result.users if reader.target is aten.contiguous.default]
    readers = [reader for node in (result, *laid_out) for reader in node.users if reader not in laid_out]
    is_cast = any(reader.target is aten.to.dtype for reader in readers)
    sums = [reader for reader in readers if reader.target is aten.add.Tensor and reader not in ours]
    return Around(has_graphs, is_cast, bool(sums) and len(sums) == len(readers))


def _entry(ledger: Ledger, asked: SiteProblem, known: Around | None) -> Entry | None:
    """The planned entry; a refusal where PyTorch multiplies and Inductor's passes after that are as good as ours.
    Without surroundings no Inductor compiles the graph."""
    entry = ledger.planned(asked)
    plan = entry.outcome if entry is not None else None
    if known is None or not (isinstance(plan, Plan) and plan.on_gpu and plan.own is None):
        return entry
    why = _why_inductors(asked, plan, known)
    return entry if why is None else ledger.refuse(asked, why)


def _why_inductors(asked: SiteProblem, plan: Plan, known: Around) -> str | None:
    """Why Inductor should run a chain whose producer is PyTorch's; None if we should.

    Inductor also generates a single pass, and fuses it with its neighbours: for example a residual's sum with the
    moments of the norm after it. Under autocast a chain also casts its weight at each call, which Inductor does for
    all weights at once: of a small value, Inductor takes less host time for several passes, too. A result that
    several readers want, some of them in 16 bits, Inductor writes in both widths at once; after ours, the cast is a
    pass of its own (0.35 of the 4.4 ms GPU time of resnet50_gn's inference on an H200). A channels-last result that
    is only added to another Inductor does not write at all: the pass that normalizes adds. A pool behind a norm is
    different: Inductor writes what the norm gives, at its full size, and reads it for the pool.
    """
    chain, problem = asked.chain, asked.problem
    what = "product" if chain.is_linear else "convolution"
    if _is_a_pass(chain):
        passes = "one pass" if chain.producer is None else f"PyTorch's {what} and one pass after it"
        return f"{passes}, which Inductor fuses with its neighbours"
    if known.is_cast and plan.pool is None:
        return "a result with several readers, some of it in 16 bits, which Inductor writes in one pass"
    is_summed = known.is_summed and plan.pool is None
    if is_summed and chain.producer is not None and problem.tensors[0].layout == "channels_last":
        return f"PyTorch's {what} and a result that is only added to another, which Inductor does in one pass"
    casts = chain.producer is not None and chain.convolution.dtype not in (None, problem.tensors[1].dtype)
    if not casts or known.has_graphs or problem.device != "cuda":
        return None
    least, size = machine_for(problem.place).card.crossovers.smallest_by_inductor, plan.value.bytes
    if size >= least:
        return None
    about = f"a value of {shown_bytes(size)}, fusing pays from {shown_bytes(least)} on"
    return f"PyTorch's {what} and passes that Inductor generates with less host time: {about}"


def _is_a_pass(chain: Chain) -> bool:
    is_over_channels = chain.producer is None and not any(isinstance(step, Normalize) for step in chain.steps)
    return first_barrier(chain) is None or chain.is_linear or is_over_channels


def _plans(entries: dict[Match, Entry | None], refused: set[Match]) -> dict[Match, Plan | None]:
    """The plans of the chains that are fused."""
    fused = {item: entry for item, entry in entries.items() if item not in refused}
    return {
        item: entry.outcome if entry is not None and isinstance(entry.outcome, Plan) else None
        for item, entry in fused.items()
    }
