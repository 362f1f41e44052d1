"""Which chains of a graph are fused, and which values are channels-last: decided with the whole graph in view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from postlude.chain import Chain, Normalize
from postlude.graph.expected import questions_of
from postlude.graph.layout import propagate
from postlude.graph.match import Match
from postlude.graph.regions import unpaid, withdraw
from postlude.plan import Plan
from postlude.plan.program import first_barrier
from postlude.run.ledger import Entry, Ledger, Question
from postlude.run.site import Site


@dataclass(frozen=True)
class Decided:
    """The decision for a graph, from plans only: nothing has been compiled or checked."""

    sites: list[Site]  # one for each chain
    questions: dict[Match, Question]  # for chains whose sizes are known
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
) -> Decided:
    """Decides until nothing changes: a refused chain, or a region that is not worth its conversions, may change the
    layout that other chains read, and with it their plans.

    `before` are the graph's results before any conversion, `refused` the chains that are known to be refused.
    """
    while True:
        handing_on = propagate(graph, [item for item in chains if item not in refused]) if conversions else set()
        sites = [site_for(item, "channels_last" if item in handing_on else "") for item in chains]
        asked = zip(chains, questions_of(graph, inputs, chains, sites))
        questions = {item: question for item, question in asked if question is not None}
        entries = {item: _entry(ledger, question, by_inductor) for item, question in questions.items()}
        now = {item for item, entry in entries.items() if entry is not None and entry.is_left_to_pytorch}
        if conversions and not now <= refused:
            refused = refused | now
            continue
        wasted = unpaid(graph, conversions, _plans(entries, refused), before) if conversions else []
        if not wasted:
            return Decided(sites, questions, refused | now, conversions)
        withdraw(wasted)
        conversions = [node for node in conversions if node not in wasted]
        if not conversions:
            propagate(graph, [])


def _entry(ledger: Ledger, question: Question, by_inductor: bool) -> Entry | None:
    """The planned entry; a refusal if the plan is PyTorch's producer and one pass, which Inductor generates as well.

    Inductor also fuses what surrounds that pass: for example a residual's sum with the moments of the norm after it.
    """
    entry = ledger.planned(question)
    plan = entry.outcome if entry is not None else None
    is_library = isinstance(plan, Plan) and plan.on_gpu and plan.own is None
    if by_inductor and is_library and _is_a_pass(question.chain):
        what = "product" if question.chain.is_linear else "convolution"
        passes = "one pass" if question.chain.producer is None else f"PyTorch's {what} and one pass after it"
        return ledger.refuse(question, f"{passes}, which Inductor fuses with its neighbours")
    return entry


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
