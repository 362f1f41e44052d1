"""The measurements of `postlude bench`: races, the roofline, memory, the distribution of errors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from postlude.check.clock import Calls, Contestant, Estimate, Window, difference, time_interleaved
from postlude.check.distribution import distribution
from postlude.check.floor import Ceilings, Work
from postlude.check.footprint import launches, peak_bytes, saved_bytes
from postlude.check.nested import map_tensors, tensors_in
from postlude.check.supply import Supply
from postlude.cli.variants import FORWARD, STEP, WITH_GRAPH, Runner, as_leaves, flusher
from postlude.cli.watch import Watch
from postlude.errors import first_line
from postlude.report import model

WINDOW_S = 0.05  # the shortest window that counts
FLUSH = "the flush alone"
# Operations and bytes of a forward above which the error histogram, in float64, takes two samples instead of all.
MANY_OPERATIONS = {"cpu": 2e9, "cuda": 2e12}
MANY_BYTES = 2 << 30
Timings = dict[str, Estimate]
Progress = Callable[[str], None] | None


@dataclass(frozen=True)
class Timer:
    """Runs races over the same variants."""

    runners: Sequence[Runner]
    output: Tensor
    device: str
    rounds: int
    seconds: float
    progress: Progress = None
    supplies: dict[int, Supply] = field(default_factory=dict)

    def supply_of(self, sets: Sequence[tuple[Any, ...]]) -> Supply:
        """The inputs of the variants with these sets. They share one pool: their windows take turns."""
        if id(sets) not in self.supplies:
            self.supplies[id(sets)] = Supply(sets)
        return self.supplies[id(sets)]

    def forward(self, watch: Watch, others: Mapping[str, Contestant]) -> Timings:
        """The warm forward race, including variants that have no backward pass."""
        ours = self._contestants(FORWARD)
        return self._race({**ours, **others}, watch)

    def flushed(self, watch: Watch) -> tuple[Timings, list[str]]:
        """The race with caches flushed before every call: the time of flush and call minus that of the flush."""
        flush = flusher(self.device)
        contestants = self._contestants(FORWARD, flush)
        # The second clock would include the flush, so it is not used.
        quiet = dataclasses.replace(watch, host={}, events={}, per_call={})

        def watched(name: str, window: Window) -> None:
            if name != FLUSH:
                quiet(name, window)

        found = self._race({**contestants, FLUSH: Calls(lambda _: flush())}, watched)
        alone = found.pop(FLUSH)
        return _less(found, dict.fromkeys(found, alone), "flushed caches")

    def training(self, watch: Watch) -> tuple[Timings, Timings, list[str]]:
        """A training step, and the backward pass: the step minus a forward pass that saves what it needs."""
        both = {work: self._contestants(work) for work in (WITH_GRAPH, STEP)}
        contestants = {f"{work}: {one.name}": both[work][one.name] for one in self.runners for work in both}
        found = self._race(contestants, dataclasses.replace(watch, reference=None, host={}, events={}, per_call={}))
        steps, graphs = (
            {one.name: found[f"{work}: {one.name}"] for one in self.runners} for work in (STEP, WITH_GRAPH)
        )
        backward, why = _less(steps, graphs, "backward")
        return steps, backward, why

    def _contestants(self, work: str, flush: Callable[[], object] | None = None) -> dict[str, Contestant]:
        return {
            one.name: one.contestant(work, self.output, self.supply_of(one.sets), self.device, flush)
            for one in self.runners
        }

    def _race(self, contestants: Mapping[str, Contestant], watch: Callable[[str, Window], None]) -> Timings:
        return time_interleaved(
            contestants,
            rounds=self.rounds,
            min_window_s=WINDOW_S,
            budget_s=self.seconds,
            progress=self.progress,
            on_window=watch,
        )


def _less(found: Timings, part: Mapping[str, Estimate], what: str) -> tuple[Timings, list[str]]:
    left = {name: difference(timing, part[name]) for name, timing in found.items()}
    lost = [
        f"{what}, {name}: too short relative to what is subtracted from it" for name, one in left.items() if one is None
    ]
    return {name: one for name, one in left.items() if one is not None}, lost


def roofline_of(timings: Timings, work: Work, ceilings: Ceilings) -> model.Roofline:
    points = tuple(
        model.RooflinePoint(name, timing.median, work.share(timing.median, ceilings))
        for name, timing in timings.items()
    )
    return model.Roofline(
        work.operations, work.bytes, ceilings.bytes_per_second, ceilings.operations_per_second, points
    )


@dataclass(frozen=True)
class Footprint:
    peak: int | None = None
    saved: int | None = None
    launches: int | None = None


def footprint_of(runner: Runner, device: str, train: bool) -> Footprint:
    inputs = runner.sets[0]

    def call() -> object:
        return runner.model(*inputs)

    with runner.around():
        with torch.no_grad():
            peak = peak_bytes(call, device)
            count = launches(call) if device == "cuda" else None
        saved = None
        if train:
            known = [*tensors_in(list(inputs)), *getattr(runner.model, "parameters", tuple)()]
            leaves = as_leaves(inputs)
            saved = saved_bytes(lambda: runner.model(*leaves), known)
    return Footprint(peak, saved, count)


def histograms_of(
    reference: nn.Module, answers: Mapping[str, Callable[..., Any]], inputs: Sequence[Any], work: Work, device: str
) -> tuple[list[model.Histogram], list[str]]:
    """How the errors of each variant are distributed on one set of inputs, or why that was left out."""
    is_large = work.operations >= MANY_OPERATIONS[device] or work.bytes >= MANY_BYTES
    few = _two_samples(inputs) if is_large else inputs
    try:
        with torch.no_grad():
            exact = copy.deepcopy(reference).double()
            truth = exact(*map_tensors(lambda x: x.double() if x.is_floating_point() else x, list(few)))
            found = {name: distribution(answer(*few), truth) for name, answer in answers.items()}
    except (RuntimeError, ValueError, TypeError) as error:  # the model does not accept a smaller batch or float64
        return [], [f"error distribution: the model did not run on two samples in float64 ({first_line(error)})"]
    return [
        model.Histogram(name, one.edges, one.counts, one.exact, one.worst)
        for name, one in found.items()
        if one is not None
    ], []


def _two_samples(inputs: Sequence[Any]) -> list[Any]:
    batch = next((x.shape[0] for x in inputs if isinstance(x, Tensor) and x.dim()), 0)
    return [x[:2] if isinstance(x, Tensor) and x.dim() and x.shape[0] == batch else x for x in inputs]
