"""What `postlude.optimize` found and did to a model, and how to undo it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from postlude import hardware
from postlude.chain import Chain
from postlude.check.verdict import Verdict
from postlude.graph.backend import Backend
from postlude.graph.compiled import uninstall
from postlude.graph.layout import Conversion
from postlude.graph.match import Declined
from postlude.plan import Plan, Problem, Refusal

if TYPE_CHECKING:
    from postlude.report import Report

# An attribute of the function through which the model is called, so that copies of the model do not have it.
_RESULT = "postlude_result"


@dataclass(frozen=True)
class SiteReport:
    """One chain of the model: where it is, what it computes, how it runs for the inputs, and whether it is right.

    Attributes:
        name: The module in which the chain begins.
        chain: What is computed.
        problem: The shapes, dtypes, layouts, device and precision of the call.
        outcome: The plan that runs, or the refusal with its reasons.
        verdict: The check against float64; None if there was none.
    """

    name: str
    chain: Chain
    problem: Problem
    outcome: Plan | Refusal
    verdict: Verdict | None

    @property
    def is_fused(self) -> bool:
        """Whether the chain runs fused."""
        return isinstance(self.outcome, Plan)


@dataclass(frozen=True, repr=False)
class Optimized:
    """What `optimize` found and did.

    Attributes:
        model: The model, which was changed in place.
        sites: The chains that were found, fused or refused.
        declined: Operators that are in no chain, with the reasons.
        verdict: On all fused chains together; None if nothing was fused, or with `verify=False`.
        failure: Why the model could not be captured; None if it was.
    """

    model: nn.Module
    sites: tuple[SiteReport, ...]
    declined: tuple[Declined, ...]
    verdict: Verdict | None
    failure: str | None
    backend: Backend

    def __repr__(self) -> str:
        """A line on the whole and one per chain, like a module's; the fields have the rest."""
        fused = sum(site.is_fused for site in self.sites)
        whole = self.failure or self.verdict or ("not checked" if fused else "nothing to check")
        lines = [f"Optimized({type(self.model).__name__}: {fused} of {len(self.sites)} chains fused; {whole}"]
        for site in self.sites:
            how = "fused" if isinstance(site.outcome, Plan) else f"PyTorch's, {site.outcome.reasons[0]}"
            lines.append(f"  ({site.name}): {site.chain}: {how}")
        if self.declined:
            lines.append(f"  in no chain: {', '.join(item.name for item in self.declined)}")
        return "\n".join([*lines, ")"])

    @property
    def conversions(self) -> tuple[Conversion, ...]:
        """Where values become channels-last, and contiguous again."""
        return tuple(item for captured in self.backend.captured for item in captured.conversions)

    @property
    def gathered(self) -> tuple[str, ...]:
        """Upsampling whose gradient our kernel gathers."""
        return tuple(name for captured in self.backend.captured for name in captured.gathered)

    def undo(self) -> nn.Module:
        """Makes the model run as before. Does nothing if the model has been optimized again since."""
        if result_of(self.model) is self:
            uninstall(self.model)
        return self.model

    def report(self, path: str | Path | None = None, *, title: str = "") -> Report:
        """A report of what was done, without times; `postlude bench FILE.py --report PATH` measures them.

        Args:
            path: If given, the report is written there; the suffix (.html, .json or .csv) chooses the format.
            title: The report's title.
        """
        from postlude.report import gather, write

        device = self.sites[0].problem.device if self.sites else hardware.default_device()
        report = gather.report_of(
            title or type(self.model).__name__,
            [
                gather.site_of(one.name, one.chain, one.problem, one.outcome, one.is_fused, one.verdict)
                for one in self.sites
            ],
            [(item.name, item.what, item.reason) for item in self.declined],
            self.verdict,
            device,
            () if self.failure is None else (f"the model was not captured: {self.failure}",),
            [(item.name, item.layout, item.shape, item.bytes) for item in self.conversions],
        )
        if path is not None:
            write(path, report)
        return report


def is_optimized(model: nn.Module) -> bool:
    """Whether `model` itself runs fused. A deep copy or an unpickled model is plain, so it gives False."""
    return result_of(model) is not None


def result_of(model: nn.Module) -> Optimized | None:
    found: Optimized | None = getattr(model._compiled_call_impl, _RESULT, None)
    return found


def remember(result: Optimized, run: Callable[..., Any]) -> Optimized:
    """The result, which is noted at the function through which its model is called."""
    vars(run)[_RESULT] = result
    return result
