"""The torch.compile backend named `postlude`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from postlude import hardware
from postlude.errors import PostludeError, first_line
from postlude.graph import spellings
from postlude.graph.biases import add_apart
from postlude.graph.capture import MODE_CHANGES, TracedAgain, capture
from postlude.graph.casts import cast_inputs, cast_weights
from postlude.graph.checkpoints import keep_random_state
from postlude.graph.decide import decide
from postlude.graph.dropouts import Opened, close_dropouts, masks_of, open_dropouts
from postlude.graph.expected import site_problems, wanting_gradients
from postlude.graph.inductor import compile_rest, start_workers
from postlude.graph.layout import (
    Conversion,
    UnsuitedError,
    conversions_in,
    hold,
    hold_convolutions,
    read_channels_last,
    restore_results,
    results_of,
)
from postlude.graph.match import Declined, Match, match
from postlude.graph.norms import keep_layouts
from postlude.graph.pool_gradients import gather_pool_gradients
from postlude.graph.pools import left_to_pytorch
from postlude.graph.splice import splice, use_operator
from postlude.graph.tidy import functionalise, restore
from postlude.graph.upsample import expect_gathers, gather_gradients
from postlude.plan import Plan, Refusal
from postlude.plan.problem import is_convolved_by_loops
from postlude.run.apart import without_saving_hooks
from postlude.run.execute import check_convolution, check_precision
from postlude.run.ledger import Entry, Ledger
from postlude.run.operator_call import judged_by
from postlude.run.site import Site
from postlude.tested import untested_versions

log = logging.getLogger("postlude")
RESTS = ("auto", "eager", "inductor")
LAYOUTS = ("auto", "keep")
MEMORIES = ("default", "lean")
LEFT_OUT = "left out by only="
_MULTIPLIED = "PyTorch runs this product, and chains begin after it"


@dataclass(frozen=True)
class Captured:
    """What one graph became."""

    sites: tuple[Site, ...]
    declined: tuple[Declined, ...]
    conversions: tuple[Conversion, ...] = ()  # where values become channels-last, and contiguous again
    gathered: tuple[str, ...] = ()  # upsampling whose gradient our kernel gathers


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
            traced = capture(graph, inputs)
        except Exception as error:  # a private interface has changed, or an operator cannot be traced
            self._warn_of(error)
            return _as_it_is(graph)
        try:
            return self._compile(traced, inputs, self.layout)
        except UnsuitedError as why:
            log.info("layouts stay as they are (%s)", why)
            return self._compile(capture(graph, inputs), inputs, "keep")

    def give_up(self, error: Exception) -> None:
        """Later calls of the model run as it was."""
        self.has_given_up = True
        self._warn_of(error)

    def _warn_of(self, error: Exception) -> None:
        self.failure = first_line(error)
        log.warning("this model could not be captured and runs as it was (%s)", self.failure)

    def _compile(self, traced: fx.GraphModule, inputs: Sequence[Any], layout: str) -> Callable[..., Any]:
        functionalise(traced)
        cast_inputs(traced, wanting_gradients(traced, inputs))
        dropouts = self._open_dropouts(traced, inputs)
        rest = self._rest_for(traced, inputs)
        if rest == "inductor" and _device_of(inputs) == "cuda":
            start_workers()  # while chains are planned, built and checked
        before = results_of(traced)
        # Some operators return contiguous results for channels-last inputs. Inductor fuses the conversion, eager does
        # not.
        lays_out = rest == "inductor" and layout == "auto"
        conversions = read_channels_last(traced, self._is_fp32_fast(inputs)) if lays_out else []
        found, declined = self._match(traced, inputs)
        left_out = [item for item in found if self.wanted is not None and not self.wanted(item.name, item)]
        found = [item for item in found if item not in left_out]
        sites, fused = self._decided(traced, inputs, found, rest, conversions, before)
        gathered = gather_gradients(traced, wanting_gradients(traced, inputs), self.ledger.check is not None)
        restore_results(traced, before)
        declined += [Declined(item.name, str(item.chain), LEFT_OUT) for item in left_out]
        left = conversions_in(traced) if conversions else ()
        self.captured.append(Captured(tuple(sites), tuple(declined), left, tuple(gathered)))
        splice(traced, list(fused), [site for site, _ in fused.values()])
        close_dropouts(traced, dropouts)
        if conversions:
            hold(traced)
            keep_layouts(traced)
            hold_convolutions(traced)
            cast_weights(traced, wanting_gradients(traced, inputs))
            add_apart(traced)
        restore(traced)
        if rest == "inductor":
            for item, (site, _) in fused.items():
                if item.has_symbols:
                    judged_by(site.chain, site.settings, site.name, self.ledger)
            use_operator(traced, list(fused.values()))
            gather_pool_gradients(traced, wanting_gradients(traced, inputs))
        traced.graph.lint()
        traced.recompile()
        return _as_it_is(traced) if rest == "eager" else self._by_inductor(traced, inputs)

    def _decided(
        self,
        traced: fx.GraphModule,
        inputs: Sequence[Any],
        found: list[Match],
        rest: str,
        conversions: list[fx.Node],
        before: Sequence[Any],
    ) -> tuple[list[Site], dict[Match, tuple[Site, Plan | Refusal | None]]]:
        """A site for every chain; for those that are fused also the plan, if sizes are known."""
        refused = set[Match]()
        while True:
            known = decide(
                *(traced, inputs, found, conversions, before, self._site, self.ledger, refused),
                by_inductor=rest == "inductor",
                has_graphs=self._has_graphs(),
            )
            fused = {item: asked for item, asked in known.problems.items() if item not in known.refused}
            self.ledger.expect(list(fused.values()))
            expect_gathers(traced, wanting_gradients(traced, inputs))
            if rest == "eager":  # where sizes are symbols, each call plans and checks
                off = {item for item in known.refused if not item.has_symbols}
                return known.sites, {item: (site, None) for item, site in zip(found, known.sites) if item not in off}
            # Inductor compiles the graph only once, so a chain is checked before that; otherwise at its first call.
            entries = {item: self.ledger.foresee(asked) for item, asked in fused.items()}
            off = {item for item, entry in entries.items() if entry.is_left_to_pytorch}
            refused, conversions = known.refused | off, known.conversions
            if not off or not conversions:
                break
        outcomes = {item: entry.outcome for item, entry in entries.items()}
        pairs = zip(found, known.sites)
        return known.sites, {item: (site, outcomes.get(item)) for item, site in pairs if item not in refused}

    def _open_dropouts(self, traced: fx.GraphModule, inputs: Sequence[Any]) -> list[Opened]:
        """Opens dropouts, except those with which a chain is refused: it may be fused if it ends before its last one,
        because a pass reads few tensors."""
        opened = open_dropouts(traced)
        while opened:
            found, _ = self._match(traced, inputs)
            entries = self._planned(traced, inputs, [item for item in found if masks_of(item.tensors)])
            last = {masks_of(item.tensors)[-1] for item, entry in entries if entry and entry.is_left_to_pytorch}
            if not last:
                break
            close_dropouts(traced, [one for one in opened if one.mask in last])
            opened = [one for one in opened if one.mask not in last]
        return opened

    def _match(self, traced: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Match], list[Declined]]:
        device = _device_of(inputs)
        # cuDNN's convolutions in strict fp32 use no tensor cores, and ours do.
        is_strict = device == "cuda" and not self._allows_tf32()

        def takes_alone(node: fx.Node) -> bool:
            if node.meta["val"].dtype != torch.float32:
                return False
            return is_strict or (device == "cpu" and self.convolution != "pytorch" and _is_convolved_by_loops(node))

        declines = functools.partial(left_to_pytorch, device)
        found, declined = match(traced, declines, takes_alone)
        left = self._hiding_others(traced, inputs, found)
        if left:
            found, declined = match(traced, declines, takes_alone, left={item.nodes[0] for item in left})
        return found, declined + [Declined(item.name, str(item.chain), _MULTIPLIED) for item in left]

    def _hiding_others(self, traced: fx.GraphModule, inputs: Sequence[Any], found: list[Match]) -> list[Match]:
        """Chains of a linear layer that PyTorch multiplies, if a chain may begin after it: at a value of four or five
        axes."""
        some = [item for item in found if item.chain.is_linear and item.chain.steps]
        some = [item for item in some if item.tensors[0].meta["val"].dim() in (4, 5)]
        entries = self._planned(traced, inputs, some)
        return [item for item, entry in entries if entry and getattr(entry.outcome, "own", None) is None]

    def _planned(
        self, traced: fx.GraphModule, inputs: Sequence[Any], found: list[Match]
    ) -> list[tuple[Match, Entry | None]]:
        """Each chain with its entry from planning only, if its sizes are known."""
        problems = site_problems(traced, inputs, found, [self._site(item, "") for item in found])
        pairs = zip(found, problems)
        return [(item, None if asked is None else self.ledger.planned(asked)) for item, asked in pairs]

    def _site(self, item: Match, hands_on: str) -> Site:
        return Site(item.name, item.chain, self.precision, self.memory, self.convolution, self.ledger, hands_on)

    def _allows_tf32(self) -> bool:
        asked = self.precision == "auto" and hardware.default_fp32_precision() == "tf32"
        return asked or self.precision == "tf32"

    def _is_fp32_fast(self, inputs: Sequence[Any]) -> bool:
        """Whether PyTorch convolves fp32 on tensor cores, as it may in TF32. Cards before Ampere cannot."""
        places = [x.device for x in inputs if isinstance(x, torch.Tensor) and x.is_cuda]
        return self._allows_tf32() and all(hardware.machine_for(place).card.is_served for place in places[:1])

    def _rest_for(self, traced: fx.GraphModule, inputs: Sequence[Any]) -> str:
        """Who runs what is not fused: Inductor on a GPU, unless nothing is left for it, because calling a chain
        directly takes less host time. Inductor also makes the CUDA graphs that a mode asks for. On a CPU Inductor
        compiles C++ for tens of seconds, so it runs only on request."""
        if self.rest != "auto":
            return self.rest
        has_inductor = _device_of(inputs) == "cuda" and hardware.can_compile()
        is_wanted = has_inductor and (self._has_graphs() or not self._is_all_fused(traced, inputs))
        return "inductor" if is_wanted else "eager"

    def _has_graphs(self) -> bool:
        """Whether Inductor is to make CUDA graphs."""
        return bool(self.inductor.get("triton.cudagraphs"))

    def _is_all_fused(self, traced: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        found, _ = self._match(traced, inputs)
        taken = {node for item in found for node in item.nodes}
        others = {node for node in traced.graph.nodes if node.op == "call_function" and node.target not in MODE_CHANGES}
        if not found or others - taken or self.wanted is not None:
            return False
        entries = self._planned(traced, inputs, found)
        return not any(entry is None or entry.is_left_to_pytorch for _, entry in entries)

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


def _is_convolved_by_loops(node: fx.Node) -> bool:
    call = spellings.arguments_of(node)
    x, weight = (call[name].meta["val"].shape for name in ("input", "weight"))
    has_sizes = len(x) == 5 and all(isinstance(size, int) for size in x)
    return has_sizes and is_convolved_by_loops(x, weight[2:], call["groups"])


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
