"""One graph of a model: its chains are found, decided upon and replaced."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from postlude import hardware
from postlude.graph import spellings
from postlude.graph.biases import add_apart
from postlude.graph.capture import MODE_CHANGES
from postlude.graph.casts import cast_inputs, cast_weights
from postlude.graph.decide import decide
from postlude.graph.dropouts import Opened, close_dropouts, masks_of, open_dropouts
from postlude.graph.expected import site_problems, wanting_gradients
from postlude.graph.inductor import start_workers
from postlude.graph.layout import (
    Conversion,
    conversions_in,
    hold,
    hold_convolutions,
    keep_layouts,
    read_channels_last,
    restore_results,
    results_of,
)
from postlude.graph.match import Declined, Match, match
from postlude.graph.names import modules_called
from postlude.graph.pool_gradients import gather_pool_gradients
from postlude.graph.pools import left_to_pytorch
from postlude.graph.splice import splice, use_operator
from postlude.graph.tidy import functionalise, restore
from postlude.graph.upsample import expect_gathers, gather_gradients
from postlude.plan import Plan, Refusal, Settings
from postlude.plan.problem import is_convolved_by_loops
from postlude.run.ledger import Entry
from postlude.run.operator_call import judged_by
from postlude.run.site import Site

if TYPE_CHECKING:
    from postlude.graph.backend import Backend

LEFT_OUT = "left out by only="
_MULTIPLIED = "PyTorch runs this product, and chains begin after it"
Fused = dict[Match, "tuple[Site, Plan | Refusal | None]"]


@dataclass(frozen=True)
class Captured:
    """What one graph became."""

    sites: tuple[Site, ...]
    declined: tuple[Declined, ...]
    conversions: tuple[Conversion, ...] = ()  # where values become channels-last, and contiguous again
    gathered: tuple[str, ...] = ()  # upsampling whose gradient our kernel gathers
    modules: frozenset[str] = frozenset()  # the ids of those called in the graph; none in code between layers


class Fusion:
    """A graph and what is asked of it; `run` changes the graph."""

    def __init__(
        self, backend: Backend, traced: fx.GraphModule, inputs: Sequence[Any], device: str, layout: str
    ) -> None:
        self.backend, self.ledger = backend, backend.ledger
        self.traced, self.inputs, self.device, self.layout = traced, inputs, device, layout

    def run(self) -> tuple[Captured, str]:
        """Replaces the chains. Returns what the graph became, and who runs the rest: "eager" or "inductor"."""
        traced, wanted = self.traced, self.backend.wanted
        functionalise(traced)
        cast_inputs(traced, self._wanting_gradients())
        dropouts = self._open_dropouts()
        rest = self._rest()
        if rest == "inductor" and self.device == "cuda":
            start_workers()  # while chains are planned, built and checked
        before, modules = results_of(traced), modules_called(traced)
        # Some operators return contiguous results for channels-last inputs. Inductor fuses the conversion, eager does
        # not.
        lays_out = rest == "inductor" and self.layout == "auto"
        conversions = read_channels_last(traced, self._is_fp32_fast()) if lays_out else []
        found, declined = self._match()
        left_out = [item for item in found if wanted is not None and not wanted(item.name, item)]
        found = [item for item in found if item not in left_out]
        declined += [Declined(item.name, str(item.chain), LEFT_OUT) for item in left_out]
        sites, fused = self._decided(found, rest, conversions, before)
        gathered = gather_gradients(traced, self._wanting_gradients(), self.ledger.check is not None)
        restore_results(traced, before)
        left = conversions_in(traced) if conversions else ()
        splice(traced, list(fused), [site for site, _ in fused.values()])
        close_dropouts(traced, dropouts)
        self._finish(fused, rest, lays_out=bool(conversions))
        return Captured(tuple(sites), tuple(declined), left, tuple(gathered), modules), rest

    def _finish(self, fused: Fused, rest: str, lays_out: bool) -> None:
        """Prepares what is not fused for those who run it."""
        traced = self.traced
        if lays_out:
            hold(traced)
            keep_layouts(traced)
            hold_convolutions(traced)
            cast_weights(traced, self._wanting_gradients())
            add_apart(traced)
        restore(traced)
        if rest == "inductor":
            for item, (site, _) in fused.items():
                if item.has_symbols:
                    judged_by(site.chain, site.settings, site.name, self.ledger)
            use_operator(traced, list(fused.values()))
            gather_pool_gradients(traced, self._wanting_gradients())
        traced.graph.lint()
        traced.recompile()

    def _wanting_gradients(self) -> set[fx.Node]:
        """The nodes of the graph as it is now."""
        return wanting_gradients(self.traced, self.inputs)

    def _decided(
        self, found: list[Match], rest: str, conversions: list[fx.Node], before: Sequence[Any]
    ) -> tuple[list[Site], Fused]:
        """A site for every chain; for those that are fused also the plan, if sizes are known."""
        refused = set[Match]()
        while True:
            known = decide(
                *(self.traced, self.inputs, found, conversions, before, self._site, self.ledger, refused),
                by_inductor=rest == "inductor",
                has_graphs=self._has_graphs(),
            )
            fused = {item: asked for item, asked in known.problems.items() if item not in known.refused}
            self.ledger.expect(list(fused.values()))
            expect_gathers(self.traced, self._wanting_gradients())
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

    def _open_dropouts(self) -> list[Opened]:
        """Opens dropouts, except those with which a chain is refused: it may be fused if it ends before its last one,
        because a pass reads few tensors."""
        opened = open_dropouts(self.traced)
        while opened:
            found, _ = self._match()
            entries = self._planned([item for item in found if masks_of(item.tensors)])
            last = {masks_of(item.tensors)[-1] for item, entry in entries if entry and entry.is_left_to_pytorch}
            if not last:
                break
            close_dropouts(self.traced, [one for one in opened if one.mask in last])
            opened = [one for one in opened if one.mask not in last]
        return opened

    def _match(self) -> tuple[list[Match], list[Declined]]:
        # cuDNN's convolutions in strict fp32 use no tensor cores, and ours do.
        is_strict = self.device == "cuda" and not self._allows_tf32()
        may_be_ours = self.device == "cpu" and self.backend.convolution != "pytorch"

        def takes_alone(node: fx.Node) -> bool:
            is_fp32 = node.meta["val"].dtype == torch.float32
            return is_fp32 and (is_strict or (may_be_ours and _is_convolved_by_loops(node)))

        declines = functools.partial(left_to_pytorch, self.device)
        found, declined = match(self.traced, declines, takes_alone)
        left = self._hiding_others(found)
        if left:
            found, declined = match(self.traced, declines, takes_alone, left={item.nodes[0] for item in left})
        return found, declined + [Declined(item.name, str(item.chain), _MULTIPLIED) for item in left]

    def _hiding_others(self, found: list[Match]) -> list[Match]:
        """Chains of a linear layer that PyTorch multiplies, if a chain may begin after it: at a value of four or five
        axes."""
        some = [item for item in found if item.chain.is_linear and item.chain.steps]
        some = [item for item in some if item.tensors[0].meta["val"].dim() in (4, 5)]
        entries = self._planned(some)
        return [item for item, entry in entries if entry and getattr(entry.outcome, "own", None) is None]

    def _planned(self, found: list[Match]) -> list[tuple[Match, Entry | None]]:
        """Each chain with its entry from planning only, if its sizes are known."""
        problems = site_problems(self.traced, self.inputs, found, [self._site(item, "") for item in found])
        pairs = zip(found, problems)
        return [(item, None if asked is None else self.ledger.planned(asked)) for item, asked in pairs]

    def _site(self, item: Match, hands_on: str) -> Site:
        settings = Settings(self.backend.precision, self.backend.memory, self.backend.convolution, hands_on)
        return Site(item.name, item.chain, settings, self.ledger)

    def _allows_tf32(self) -> bool:
        asked = self.backend.precision == "auto" and hardware.default_fp32_precision() == "tf32"
        return asked or self.backend.precision == "tf32"

    def _is_fp32_fast(self) -> bool:
        """Whether PyTorch convolves fp32 on tensor cores, as it may in TF32. Cards before Ampere cannot."""
        places = [x.device for x in self.inputs if isinstance(x, torch.Tensor) and x.is_cuda]
        return self._allows_tf32() and all(hardware.machine_for(place).card.is_served for place in places[:1])

    def _rest(self) -> str:
        """Who runs what is not fused: Inductor on a GPU, unless nothing is left for it, because calling a chain
        directly takes less host time. Inductor also makes the CUDA graphs that a mode asks for. On a CPU Inductor
        compiles C++ for tens of seconds, so it runs only on request."""
        if self.backend.rest != "auto":
            return self.backend.rest
        has_inductor = self.device == "cuda" and hardware.can_compile()
        is_wanted = has_inductor and (self._has_graphs() or not self._is_all_fused())
        return "inductor" if is_wanted else "eager"

    def _has_graphs(self) -> bool:
        """Whether Inductor is to make CUDA graphs."""
        return bool(self.backend.inductor.get("triton.cudagraphs"))

    def _is_all_fused(self) -> bool:
        found, _ = self._match()
        taken = {node for item in found for node in item.nodes}
        calls = [node for node in self.traced.graph.nodes if node.op == "call_function"]
        others = {node for node in calls if node.target not in MODE_CHANGES}
        if not found or others - taken or self.backend.wanted is not None:
            return False
        entries = self._planned(found)
        return not any(entry is None or entry.is_left_to_pytorch for _, entry in entries)


def _is_convolved_by_loops(node: fx.Node) -> bool:
    call = spellings.arguments_of(node)
    x, weight = (call[name].meta["val"].shape for name in ("input", "weight"))
    has_sizes = len(x) == 5 and all(isinstance(size, int) for size in x)
    return has_sizes and is_convolved_by_loops(x, weight[2:], call["groups"])
