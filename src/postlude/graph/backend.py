"""The torch.compile backend named `postlude`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx as fx

from postlude import hardware
from postlude.errors import PostludeError
from postlude.graph.capture import capture
from postlude.graph.expected import questions_of
from postlude.graph.match import Declined, Match, match
from postlude.graph.splice import splice, use_operator
from postlude.graph.tidy import functionalise, restore
from postlude.plan import Refusal
from postlude.run import operator as _operator  # noqa: F401  registers torch.ops.postlude.chain
from postlude.run.execute import check_convolution, check_precision
from postlude.run.ledger import Ledger, Question
from postlude.run.site import Site

log = logging.getLogger("postlude")
RESTS = ("eager", "inductor")


@dataclass(frozen=True)
class Captured:
    """What one graph became."""

    sites: tuple[Site, ...]
    declined: tuple[Declined, ...]


class Backend:
    """Fuses the chains of each graph that Dynamo hands over and keeps a list of what it did."""

    def __init__(
        self,
        precision: str = "auto",
        rest: str = "eager",
        wanted: Callable[[str, Match], bool] | None = None,
        memory: str = "default",
        convolution: str = "auto",
        ledger: Ledger | None = None,
    ) -> None:
        if rest not in RESTS:
            raise PostludeError(f"rest={rest!r} is unknown; use one of {', '.join(RESTS)}.")
        check_convolution(convolution)
        self.precision, self.rest, self.wanted = precision, rest, wanted
        self.memory, self.convolution = memory, convolution
        self.ledger = Ledger() if ledger is None else ledger
        self.captured: list[Captured] = []
        self.failure: str | None = None

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        check_precision(self.precision, _device_of(inputs))
        _warn_once()
        try:
            traced = capture(graph, inputs)
        except Exception as error:  # a private interface moved, or an operator that cannot be traced
            self.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            log.warning("this model could not be captured and runs as it was (%s)", self.failure)
            return graph.forward
        return self._compile(traced, inputs)

    def _compile(self, traced: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        functionalise(traced)
        found, declined = match(traced)
        reasons = {item: why for item in found if (why := self._why_left_out(item, inputs)) is not None}
        found = [item for item in found if item not in reasons]
        sites = [self._site(item) for item in found]
        expected = questions_of(traced, inputs, found, sites)
        self.ledger.expect([question for question in expected if question is not None])
        if self.rest == "inductor":
            for item, site, question in zip(list(found), list(sites), expected):
                if (why := self._why_refused(question)) is not None:
                    reasons[item] = why
                    found.remove(item)
                    sites.remove(site)
        declined += [Declined(item.name, str(item.chain), why) for item, why in reasons.items()]
        splice(traced, found, sites)
        restore(traced)
        self.captured.append(Captured(tuple(sites), tuple(declined)))
        if self.rest == "inductor":
            use_operator(traced, {f"chain_{number}": site for number, site in enumerate(sites)})
        traced.graph.lint()
        traced.recompile()
        if self.rest == "eager":
            return traced.forward
        from torch._inductor.compile_fx import compile_fx

        return cast("Callable[..., Any]", compile_fx(traced, list(inputs)))

    def _site(self, item: Match) -> Site:
        return Site(item.name, item.chain, self.precision, self.memory, self.convolution, self.ledger)

    def _why_left_out(self, item: Match, inputs: Sequence[Any]) -> str | None:
        if self.wanted is not None and not self.wanted(item.name, item):
            return "left out by only="
        if self.rest != "inductor":
            return None
        if item.chain.moved:
            return "rest='inductor' cannot be told of running statistics that a chain moves; they are left to Inductor"
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
            return "rest='inductor' fuses chains in inference only; training leaves them to Inductor"
        return None

    def _why_refused(self, question: Question | None) -> str | None:
        """Inductor compiles what it is given once: whether a chain is fused is decided before that."""
        if question is None:
            return "rest='inductor' has to know its sizes when it compiles"
        entry = self.ledger.foresee(question)
        return "; ".join(entry.outcome.reasons) if isinstance(entry.outcome, Refusal) else None


@functools.cache
def _warn_once() -> None:
    for sentence in hardware.untested_versions():
        log.warning(sentence)


def _device_of(inputs: Sequence[Any]) -> str:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return tensors[0].device.type if tensors else hardware.default_device()
