"""The options of `postlude bench`, and its results so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from postlude.check.verdict import Outcome, Verdict
from postlude.cli.frame import Settings
from postlude.cli.measure import Timings
from postlude.cli.other_shapes import OWN
from postlude.cli.session import Opened
from postlude.cli.variants import Runner
from postlude.optimized import Optimized
from postlude.report.model import CANDIDATE, POSTLUDE


@dataclass(frozen=True)
class Options:
    file: Path
    candidate: Path | None = None
    train: bool = False
    rounds: int = 20
    seconds: float = 30.0
    flushed: bool = True
    baselines: str | None = None  # one of LEVELS; None: all on a GPU, the usual ones on a CPU
    csv: Path | None = None
    report: Path | None = None
    shapes: str = OWN  # the file's own, or shapes derived from them
    beside_others: bool = False  # other problems of a suite prepare at the same time: ignore the machine's load


@dataclass
class Bench:
    """The results so far."""

    settings: Settings
    options: Options
    opened: Opened
    state: dict[str, Tensor]
    mode: str
    sets: list[tuple[Any, ...]] = field(default_factory=list)
    runners: list[Runner] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    result: Optimized | None = None
    races: list[tuple[str, str, Timings]] = field(default_factory=list)
    site_seconds: list[tuple[float, float]] = field(default_factory=list)  # of each site of a network
    findings: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def subject(self) -> str:
        return POSTLUDE if self.options.candidate is None else CANDIDATE

    @property
    def refused(self) -> frozenset[str]:
        """Variants that get no speed-up: wrong ones, and those that are just PyTorch under another name."""
        wrong = {name for name, verdict in self.verdicts.items() if not verdict.right}
        fused = self.result is not None and any(site.is_fused for site in self.result.sites)
        return frozenset(wrong if fused else {*wrong, POSTLUDE})

    def reject(self, name: str, reason: str, outcome: Outcome = "wrong") -> None:
        """Records what was found while timing: a verdict for a judged variant, a finding for PyTorch's own."""
        if name not in (POSTLUDE, CANDIDATE):
            self.findings.append(reason)
            return
        known = self.verdicts.get(name)
        if known is None or known.right:
            self.notes[name] = f"{outcome} while it was timed"
        reasons = () if known is None or known.right else known.reasons
        quantities = () if known is None else known.quantities
        outcome = outcome if known is None or known.right else known.outcome
        self.verdicts[name] = Verdict(outcome, (*reasons, reason), self.mode, quantities)
