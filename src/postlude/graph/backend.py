"""The torch.compile backend named `postlude`."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from postlude import hardware
from postlude.errors import PostludeError, first_line
from postlude.graph.capture import TracedAgain, capture
from postlude.graph.checkpoints import keep_random_state
from postlude.graph.fusion import Captured, Fusion
from postlude.graph.inductor import compile_rest
from postlude.graph.layout import UnsuitedError
from postlude.graph.match import Match
from postlude.graph.names import name_from
from postlude.run.apart import without_saving_hooks
from postlude.run.execute import check_convolution, check_precision
from postlude.run.ledger import Ledger
from postlude.tested import untested_versions

log = logging.getLogger("postlude")
RESTS = ("auto", "eager", "inductor")
LAYOUTS = ("auto", "keep")
MEMORIES = ("default", "lean")


class Backend:
    """Fuses the chains of each graph that Dynamo passes to it, and records what it did."""

    def __init__(
        self,
        precision: str = "auto",
        rest: str = "auto",
        wanted: Callable[[str, Match], bool] | None = None,
        memory: str = "default",
        convolution: str = "auto",
        ledger: Ledger | None = None,
        inductor: dict[str, Any] | None = None,
        layout: str = "auto",
    ) -> None:
        if rest not in RESTS:
            raise PostludeError(f"rest={rest!r} is unknown; use one of {', '.join(RESTS)}.")
        if layout not in LAYOUTS:
            raise PostludeError(f"layout={layout!r} is unknown; use one of {', '.join(LAYOUTS)}.")
        check_memory(memory)
        check_convolution(convolution)
        self.precision, self.rest, self.wanted = precision, rest, wanted
        self.memory, self.convolution = memory, convolution
        self.inductor, self.layout = inductor or {}, layout  # Inductor's options; "auto" or "keep"
        self.ledger = Ledger() if ledger is None else ledger
        self.model: weakref.ref[nn.Module] | None = None  # whose names are given to chains
        self.captured: list[Captured] = []
        self.failure: str | None = None
        self.has_given_up = False

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        check_precision(self.precision, _device_of(inputs))
        _warn_once()
        with without_saving_hooks():  # tracing saves tensors too, which a checkpoint around the model would count
            return self._compiled(graph, inputs)

    def _compiled(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            traced = self._traced(graph, inputs)
        except Exception as error:  # a private interface has changed, or an operator cannot be traced
            self._warn_of(error)
            return _as_it_is(graph)
        try:
            return self._fused(traced, inputs, self.layout)
        except UnsuitedError as why:
            log.info("layouts stay as they are (%s)", why)
            return self._fused(self._traced(graph, inputs), inputs, "keep")

    def _traced(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        traced = capture(graph, inputs)
        model = None if self.model is None else self.model()
        if model is not None:
            name_from(traced, model)
        return traced

    def give_up(self, error: Exception) -> None:
        """Later calls of the model run as it was."""
        self.has_given_up = True
        self._warn_of(error)

    def _warn_of(self, error: Exception) -> None:
        self.failure = first_line(error)
        log.warning("this model could not be captured and runs as it was (%s)", self.failure)

    def _fused(self, traced: fx.GraphModule, inputs: Sequence[Any], layout: str) -> Callable[..., Any]:
        captured, rest = Fusion(self, traced, inputs, _device_of(inputs), layout).run()
        self.captured.append(captured)
        return _as_it_is(traced) if rest == "eager" else self._by_inductor(traced, inputs)

    def _by_inductor(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return compile_rest(graph, inputs, self.inductor)
        except TracedAgain:
            self.captured.pop()
            raise
        except Exception as error:
            if self.rest == "inductor":
                raise
            log.warning("Inductor failed (%s): what is not fused runs as it was", first_line(error))
            return _as_it_is(graph)


def check_memory(memory: str) -> None:
    if memory not in MEMORIES:
        raise PostludeError(f"memory={memory!r} is unknown; use {' or '.join(map(repr, MEMORIES))}.")


def _as_it_is(graph: fx.GraphModule) -> Callable[..., Any]:
    """Runs a graph operator by operator."""
    keep_random_state(graph)
    return graph.forward


@functools.cache
def _warn_once() -> None:
    for sentence in untested_versions():
        log.warning(sentence)


def _device_of(inputs: Sequence[Any]) -> str:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return tensors[0].device.type if tensors else hardware.default_device()
