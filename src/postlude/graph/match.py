"""Finds the chains of a graph, and says why a convolution or norm is in none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch.fx as fx
from torch._ops import HigherOrderOperator

from postlude.chain import LENGTHS, Chain, Normalize, Softmax, Step
from postlude.graph import spellings
from postlude.graph.capture import MODE_CHANGES
from postlude.graph.composed import is_length
from postlude.graph.convolutions import start_with_convolution
from postlude.graph.draft import Draft, start_with_input
from postlude.graph.linear import start_with_linear
from postlude.graph.names import site_name
from postlude.graph.spellings import describe
from postlude.graph.tidy import mutated_storages, storage_of

_LONGEST = 24  # steps; longer chains do not occur in practice, and the search stays linear


@dataclass(frozen=True)
class Match:
    """A chain, the nodes that it replaces (in order), and the node of each of its slots."""

    name: str
    chain: Chain
    nodes: tuple[fx.Node, ...]
    tensors: tuple[fx.Node, ...]

    @property
    def has_symbols(self) -> bool:
        """Whether sizes are a compiler's symbols, so that one graph serves many."""
        return any(not isinstance(size, int) for node in self.tensors for size in node.meta["val"].shape)


@dataclass(frozen=True)
class Declined:
    """A convolution or norm that is not fused, or a node that may contain some, such as a checkpoint."""

    name: str
    what: str
    reason: str


def match(
    graph: fx.GraphModule,
    declines: Callable[[Step], str | None] = lambda _: None,
    takes_alone: Callable[[fx.Node], bool] = lambda _: False,
    left: Collection[fx.Node] = (),
) -> tuple[list[Match], list[Declined]]:
    """The chains, and what is in none.

    `declines` returns why a chain should end before a step, or None. `takes_alone` says whether a convolution that
    nothing can be fused with is a chain, because ours is faster than PyTorch's. No chain begins with the layers `left`
    to PyTorch.
    """
    finder = _Finder(graph, declines, takes_alone)
    for node in graph.graph.nodes:
        if spellings.is_convolution(node):
            finder.try_from(node, start_with_convolution, wants_norm=False)
        elif node not in left and spellings.linear_operands(node) is not None:
            finder.try_from(node, start_with_linear, wants_norm=False)
    for node in graph.graph.nodes:
        # Without a convolution a chain begins at an elementwise step or a norm, and pays only if it has a norm.
        if node not in finder.taken and (
            spellings.norm(node) or is_length(node) or isinstance(spellings.pointwise(node), spellings.Spelled)
        ):
            before = node.all_input_nodes[0] if node.all_input_nodes else None
            if before is not None and "val" in before.meta:
                finder.try_from(before, start_with_input, wants_norm=True, first=node)
    return finder.matches, finder.declined_norms_too(graph)


class _Finder:
    def __init__(
        self, graph: fx.GraphModule, declines: Callable[[Step], str | None], takes_alone: Callable[[fx.Node], bool]
    ) -> None:
        self.declines, self.takes_alone = declines, takes_alone
        self.place: dict[fx.Node, int] = {}
        self.mode: dict[fx.Node, int] = {}  # chains do not cross a change of autocast or grad mode
        self.writes: list[tuple[int, set[object]]] = []
        self.taken: set[fx.Node] = set()
        self.matches: list[Match] = []
        self.why: dict[fx.Node, str] = {}
        mode = 0
        for number, node in enumerate(graph.graph.nodes):
            mode += node.target in MODE_CHANGES
            self.place[node], self.mode[node] = number, mode
            if "in_place" not in node.meta and (written := mutated_storages(node)):
                self.writes.append((number, written))

    def try_from(
        self,
        node: fx.Node,
        start: Callable[[fx.Node], Draft | str],
        *,
        wants_norm: bool,
        first: fx.Node | None = None,
    ) -> None:
        draft = start(node)
        if isinstance(draft, str):
            self.why[first or node] = draft
            return
        drafts, stop = self._grow(draft, first)
        best = next((d for d in reversed(drafts) if self._stands_alone(d)), None)
        if best is None and len(drafts) > 1:
            stop = "a value inside the chain is used outside it as well"
        if best is None or (wants_norm and not any(map(_is_norm, best.steps))):
            self.why[first or node] = stop
            return
        self.taken.update(best.nodes)
        self.matches.append(Match(site_name(best.nodes), best.chain(), best.nodes, best.tensors))

    def _grow(self, draft: Draft, first: fx.Node | None) -> tuple[list[Draft], str]:
        """All drafts up to the longest one, and what ended it."""
        drafts = [draft]
        refused: dict[fx.Node, str] = {}
        while len(draft.steps) < _LONGEST:
            starts = [first] if first is not None and not draft.nodes else []
            users = starts or sorted(
                {user for value in (draft.nodes or draft.values) for user in value.users}
                - set(draft.nodes)
                - set(refused),
                key=self.place.__getitem__,
            )
            if not users:
                break
            node = users[0]
            grown = self._extend(draft, node)
            if isinstance(grown, str):
                refused[node] = grown
                if starts:
                    break
                continue
            drafts.append(draft := grown)
        return drafts, next(iter(refused.values()), "nothing follows it")

    def _extend(self, draft: Draft, node: fx.Node) -> Draft | str:
        start = draft.nodes[0] if draft.nodes else node
        if node.op == "output":
            return "its result is the model's result"
        if node in self.taken:
            return f"{describe(node)} already belongs to another chain"
        if self.mode.get(node) != self.mode[start]:
            return "autocast or grad mode changes before the next step"
        grown = draft.extend(node)
        if isinstance(grown, str):
            return grown
        end = grown.nodes[-1]
        if (why := self.declines(grown.steps[-1])) is not None:
            return why
        if self._is_overwritten(grown, start, end):
            return f"a tensor that the chain reads is changed in place before {describe(node)}"
        if self._is_read_elsewhere(grown, start, end):
            return f"running statistics that the chain updates are used before {describe(node)} as well"
        return grown

    def _is_overwritten(self, draft: Draft, start: fx.Node, end: fx.Node) -> bool:
        """Whether something writes to a tensor of the chain between its first and its last node."""
        read = {storage_of(node) for node in (*draft.tensors, *draft.values)}
        first, last, inside = self.place[start], self.place[end], {self.place[node] for node in draft.nodes}
        between = [(number, written) for number, written in self.writes if first < number < last]
        return any(number not in inside and not written.isdisjoint(read) for number, written in between)

    def _is_read_elsewhere(self, draft: Draft, start: fx.Node, end: fx.Node) -> bool:
        """Whether running statistics are read between the chain's first and last node.

        The fused chain runs, and updates them, at the place of its last node.
        """
        slots = list(zip(draft.tensors, draft.roles))
        moved = {storage_of(node) for node, role in slots if role == "running"}
        if not moved:
            return False
        if any(storage_of(node) in moved for node, role in slots if role != "running"):
            return True
        users = {user for node in self.place if storage_of(node) in moved for user in node.users}
        first, last = self.place[start], self.place[end]
        norms = [step.running for step in draft.steps if isinstance(step, Normalize) and step.running is not None]
        others = users - {node for node in draft.nodes if spellings.norm(node)}
        return any(first < self.place[user] <= last for user in others) or len(norms) != len(set(norms))

    def _stands_alone(self, draft: Draft) -> bool:
        """Whether only the draft's last value is used outside it. A linear layer alone may be a chain, because its GEMM
        is most of the work, and so may a convolution."""
        if not draft.steps:
            return draft.producer is not None and (draft.producer.is_linear or self.takes_alone(draft.nodes[0]))
        inside = set(draft.nodes)
        return all(set(node.users) <= inside for node in draft.nodes[:-1])

    def declined_norms_too(self, graph: fx.GraphModule) -> list[Declined]:
        return [
            Declined(site_name((node,)), describe(node), self.why.get(node, "no chain reaches it"))
            for node in graph.graph.nodes
            if node not in self.taken and (spellings.is_convolution(node) or spellings.norm(node) or is_length(node))
        ] + [
            Declined(site_name((node,)), describe(node), "PyTorch runs everything inside it, chains included")
            for node in graph.graph.nodes
            if isinstance(node.target, HigherOrderOperator)
        ]


def _is_norm(step: Step) -> bool:
    return isinstance(step, Normalize) or (isinstance(step, Softmax) and step.op in LENGTHS)
