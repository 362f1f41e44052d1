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
from postlude.graph.match import Declined, Match, match
from postlude.graph.splice import splice, use_operator
from postlude.graph.tidy import functionalise, restore
from postlude.run import operator as _operator  # noqa: F401  registers torch.ops.postlude.chain
from postlude.run.execute import check_precision
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
        record: bool = False,
        memory: str = "default",
    ) -> None:
        if rest not in RESTS:
            raise PostludeError(f"rest={rest!r} is unknown; use one of {', '.join(RESTS)}.")
        self.precision, self.rest, self.wanted, self.memory = precision, rest, wanted, memory
        self.record = record  # sites keep crops of what they receive, for verification
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
        left_out = [item for item in found if not self._is_wanted(item, inputs)]
        declined += [Declined(item.name, str(item.chain), self._why_left_out(item)) for item in left_out]
        found = [item for item in found if item not in left_out]
        sites = [Site(item.name, item.chain, self.precision, self.memory) for item in found]
        for site in sites:
            site.recorded = [] if self.record else None
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

    def _is_wanted(self, item: Match, inputs: Sequence[Any]) -> bool:
        trains = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        if self.rest == "inductor" and (trains or item.chain.moved):
            return False
        return self.wanted is None or self.wanted(item.name, item)

    def _why_left_out(self, item: Match) -> str:
        if self.wanted is not None and not self.wanted(item.name, item):
            return "left out by only="
        if item.chain.moved:
            return "rest='inductor' cannot be told of running statistics that a chain moves; they are left to Inductor"
        return "rest='inductor' fuses chains in inference only; training leaves them to Inductor"


def postlude_backend(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """What `torch.compile(model, backend="postlude", options={...})` calls."""
    settings = dict(options.get("options") or {})
    unknown = settings.keys() - {"precision", "rest"}
    if unknown:
        raise PostludeError(f"unknown option {', '.join(sorted(unknown))}; the backend takes precision and rest.")
    return Backend(**settings)(graph, inputs)


@functools.cache
def _warn_once() -> None:
    for sentence in hardware.untested_versions():
        log.warning(sentence)


def _device_of(inputs: Sequence[Any]) -> str:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return tensors[0].device.type if tensors else hardware.default_device()
