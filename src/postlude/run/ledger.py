"""What is known about the chains of one model: the plan for every problem so far, and its verdict.

This is the only state of an optimized model. Sites and graphs hold none: when a graph is captured again, for evaluation
or another shape, it finds here what an earlier graph found out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from postlude.chain import Chain
from postlude.errors import first_line, raises_errors
from postlude.plan import Plan, Problem, Refusal
from postlude.plan.gpu import library_tf32
from postlude.run import ahead
from postlude.run.apart import without_saving_hooks
from postlude.run.execute import Runner, prepare, prepared

log = logging.getLogger("postlude")
_REMEMBERED = 256  # problems per site before the table is cleared
REPORT = "please report it, with what `postlude doctor` prints"


class Judgement(Protocol):
    """The part of a verdict that running depends on."""

    @property
    def outcome(self) -> str: ...


@dataclass(frozen=True)
class PlannedRun:
    """One call of a chain as a check needs it: real tensors, and the function that will run."""

    chain: Chain
    problem: Problem
    needs: tuple[bool, ...]  # the slots that need a gradient
    plan: Plan
    runner: Runner


Check = Callable[[PlannedRun, Sequence[Tensor] | None], Judgement]


@dataclass(frozen=True)
class Entry:
    """How a chain runs for one problem."""

    problem: Problem
    outcome: Plan | Refusal
    runner: Runner
    verdict: Any = None  # a Judgement; None if nothing was checked

    @property
    def is_left_to_pytorch(self) -> bool:
        """Whether the graph's own operators can stay. Not if a refusal names a precision that they must be called
        with."""
        return isinstance(self.outcome, Refusal) and self.outcome.library_tf32 is None


@dataclass(frozen=True)
class SiteProblem:
    """A problem that a chain will have. Known in advance, its kernels can be compiled together with others."""

    name: str
    chain: Chain
    problem: Problem
    needs: tuple[bool, ...]


class Ledger:
    """Plans, verdicts and switched-off sites of one model. `check` judges every plan before its first use, if given."""

    def __init__(self, check: Check | None = None, progress: Callable[[str], None] | None = None) -> None:
        self.check, self.progress = check, progress
        self.off: dict[str, str] = {}  # site → why PyTorch's operators run it in every graph
        self.latest: dict[tuple[str, Chain], Entry] = {}  # the most recent entry of each site
        self._tables: dict[tuple[str, Chain], dict[Any, Entry]] = {}
        self._foreseen: dict[SiteProblem, Entry] = {}
        self._lock = threading.RLock()

    def table(self, name: str, chain: Chain) -> dict[Any, Entry]:
        """The entries of one site, by the shapes, strides and dtypes of its tensors."""
        return self._tables.setdefault((name, chain), {})

    def enter(self, asked: SiteProblem, key: Any, tensors: Sequence[Tensor]) -> Entry:
        """Plans, compiles and checks a problem that is new to a site."""
        with self._lock:
            table = self.table(asked.name, asked.chain)
            if key not in table:
                if len(table) >= _REMEMBERED:
                    table.clear()
                table[key] = self.latest[asked.name, asked.chain] = self._entry(asked, tensors)
            return table[key]

    def foresee(self, asked: SiteProblem) -> Entry:
        """The entry of a problem before its tensors exist: it is checked only on random ones."""
        with self._lock:
            if asked not in self._foreseen:
                entry = self._entry(asked, None)
                others = [one for one in self._foreseen if (one.name, one.chain) == (asked.name, asked.chain)]
                if len(others) >= _REMEMBERED:  # sizes that were symbols come here at every new size
                    for one in others:
                        del self._foreseen[one]
                self._foreseen[asked] = entry  # after the check, which switches a wrong one off
            entry = self.latest[asked.name, asked.chain] = self._foreseen[asked]
            return entry

    def foreseen(self, asked: SiteProblem) -> Entry | None:
        return self._foreseen.get(asked)

    def planned(self, asked: SiteProblem) -> Entry | None:
        """The entry from planning only: nothing is compiled or checked. None if planning raises; the error shows again
        when the problem is entered."""
        if (why := self.off.get(asked.name)) is not None:
            entry = self._refused(asked, why)
        else:
            try:
                entry = Entry(asked.problem, *prepared(asked.chain, asked.problem))
            except Exception as error:
                log.debug("%s: cannot be planned ahead of time (%s)", asked.name, error)
                return None
        if entry.is_left_to_pytorch:
            self.latest[asked.name, asked.chain] = entry
        return entry

    def refuse(self, asked: SiteProblem, why: str) -> Entry:
        """Leaves a problem to PyTorch for a reason that comes from its graph."""
        entry = self.latest[asked.name, asked.chain] = self._refused(asked, why)
        return entry

    def expect(self, problems: Sequence[SiteProblem]) -> None:
        """Begins to compile the kernels of several problems together. Errors show when a problem is entered."""
        jobs: dict[str, list[ahead.Job]] = {}  # by device
        chains = 0
        for asked in problems:
            if asked.name in self.off:
                continue
            try:
                outcome, runner = prepared(asked.chain, asked.problem)
                if isinstance(outcome, Plan) and outcome.has_program:
                    program = ahead.program_of(asked.chain, runner, asked.problem, asked.needs)
                    found = ahead.jobs_of(program, asked.problem.index)
                    jobs.setdefault(asked.problem.place, []).extend(found)
                    chains += 1
            except Exception as error:
                log.debug("%s: its kernels are not known ahead of time (%s)", asked.name, error)
        if jobs:
            self._say(f"compiling the kernels of {chains} chains")
        for place, some in jobs.items():
            ahead.start_all(some, place)

    def switch_off(self, name: str, why: str) -> None:
        """From now on PyTorch's operators run the site, in existing graphs and in later ones."""
        self.off[name] = why
        self._foreseen = {asked: entry for asked, entry in self._foreseen.items() if asked.name != name}
        for (site, _), table in self._tables.items():
            if site == name:
                table.clear()

    def _entry(self, asked: SiteProblem, tensors: Sequence[Tensor] | None) -> Entry:
        chain, problem = asked.chain, asked.problem
        if (why := self.off.get(asked.name)) is not None:
            return self._refused(asked, why)
        try:
            outcome, runner = prepared(chain, problem)
            if isinstance(outcome, Refusal):
                return Entry(problem, outcome, runner)
            if outcome.has_program:
                program = ahead.program_of(chain, runner, problem, asked.needs)
                ahead.load_all(ahead.jobs_of(program, problem.index), problem.place)
            with without_saving_hooks():  # a checkpoint around the model counts what is saved
                verdict = self._checked(PlannedRun(chain, problem, asked.needs, outcome, runner), asked.name, tensors)
        except Exception as error:
            if raises_errors():
                raise
            return self._failed(asked, error)
        if verdict is not None and verdict.outcome == "wrong":
            log.warning("the fused chain at %s is wrong (%s): PyTorch runs it; %s", asked.name, verdict, REPORT)
            self.switch_off(asked.name, f"switched off because its verification failed: {verdict}")
            refused = self._refused(asked, self.off[asked.name])
            return Entry(problem, refused.outcome, refused.runner, verdict)
        return Entry(problem, outcome, runner, verdict)

    def _checked(self, call: PlannedRun, name: str, tensors: Sequence[Tensor] | None) -> Judgement | None:
        if self.check is None:
            return None
        if call.problem.device == "cuda" and torch.cuda.is_current_stream_capturing():
            log.warning("%s runs unchecked: a CUDA graph is being captured; call the model once before that", name)
            return None
        self._say(f"checking {name}: {call.chain}")
        try:
            return self.check(call, tensors)
        except torch.OutOfMemoryError:
            log.warning("%s runs unchecked: float64 needs more memory than is free", name)
            return None

    def _failed(self, asked: SiteProblem, error: Exception) -> Entry:
        why = f"its kernels could not be built ({first_line(error)})"
        log.warning("the chain at %s runs through PyTorch: %s; %s", asked.name, why, REPORT)
        self.switch_off(asked.name, why)
        return self._refused(asked, why)

    def _refused(self, asked: SiteProblem, why: str) -> Entry:
        problem = asked.problem
        # PyTorch must still convolve in the precision that was asked for.
        tf32 = library_tf32(asked.chain, problem) if problem.device == "cuda" else None
        refusal = Refusal((why,), tf32)
        return Entry(problem, refusal, prepare(asked.chain, refusal))

    def _say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what)
        else:
            log.info("%s", what)
