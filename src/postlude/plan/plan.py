"""How a chain runs, or a refusal with its reasons."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

from postlude.chain import Chain, Normalize, Reduce
from postlude.plan.barriers import (
    FusedPool,
    OverChannels,
    fused_norm,
    fused_pool,
    last_fused_step,
    over_channels,
    rows_from,
)
from postlude.plan.boxes import Boxes
from postlude.plan.cpu_few_channels import CpuFewChannels
from postlude.plan.few_channels import FewChannels, StoredFewChannels
from postlude.plan.few_channels_gradient import GradientPlan
from postlude.plan.gemm import Arithmetic, Gemm, WeightGemm
from postlude.plan.linear import LinearGemm
from postlude.plan.passes import CppPasses, Keep, KeepMoments, Pass, Store, Tile, TorchPasses
from postlude.plan.problem import Layout, Problem, Spec, compulsory_bytes
from postlude.plan.program import Program, launches, traffic
from postlude.plan.through import Through

# How a library convolves. eager: PyTorch's own call. direct: oneDNN, without PyTorch's choice of library and layout.
# buffer: oneDNN, into a channels-last buffer that is kept from call to call.
Library = Literal["eager", "direct", "buffer"]


@dataclass(frozen=True)
class Gradients:
    """Who computes a convolution's gradients in training, and what is kept for the backward pass."""

    of_input: Gemm | Boxes | None = None  # our GEMM; None: PyTorch's
    of_weight: WeightGemm | None = None
    of_both: GradientPlan | None = None  # both in one kernel, for a `FewChannels` convolution
    are_packed: bool = False  # the last gradient pass writes its result packed for both GEMMs
    is_lean: bool = False  # nothing of the convolution's size is kept: the backward pass convolves again
    from_result: bool = False  # only the chain's result is kept: the steps' gradients follow from it
    samples_again: int = 0  # that the backward pass convolves again at a time, if nothing but moments is kept

    @property
    def are_all_ours(self) -> bool:
        """Whether our kernels compute all of a convolution's gradients, so that PyTorch's switches do not matter."""
        return self.of_both is not None or (self.of_input is not None and self.of_weight is not None)

    @property
    def largest_found(self) -> Arithmetic | None:
        """The arithmetic of the GEMMs that read the gradient at the convolution's result, if all read scaled planes.

        The pass that computes the gradient then finds the scales as well.
        """
        dx = self.of_input
        return dx.arithmetic if dx is not None and self.of_weight is not None and dx.arithmetic.scaled else None


@dataclass(frozen=True)
class Plan:
    """What was decided for one problem. `program` is what it runs, call by call."""

    chain: Chain
    problem: Problem = field(repr=False)
    input: Spec
    value: Spec  # the chain's first value: the convolution's result, or the input
    passes: tuple[Pass, ...]
    by: Tile | CppPasses | TorchPasses  # what carries out the passes over the value; a tile means the GPU
    result_layout: Layout
    result_dtype: str
    reasons: tuple[str, ...]  # why it runs this way
    # What computes the producer.
    own: Gemm | Boxes | FewChannels | StoredFewChannels | LinearGemm | Through | CpuFewChannels | None = None
    library: Library = "eager"  # what does where nothing of ours does
    library_tf32: bool | None = None  # if PyTorch convolves in fp32 against its switch; None: as that is set
    gradients: Gradients = Gradients()
    tiles: tuple[str, ...] = field(default=(), compare=False)  # where each tile comes from, in words

    @functools.cached_property
    def program(self) -> Program:
        """Buffers and calls, forward and, in training, backward.

        On the CPU without a compiler there is none: slabs go through PyTorch's operators, and which of them run depends
        on the data.
        """
        from postlude.stages.program import planned_program  # it imports this module

        return planned_program(self)

    @property
    def trains(self) -> bool:
        return self.problem.needs_grad

    @property
    def tile(self) -> Tile | None:
        return self.by if isinstance(self.by, Tile) else None

    @property
    def on_gpu(self) -> bool:
        return self.tile is not None

    @property
    def is_compiled(self) -> bool:
        """Whether our C++ kernels run it, on a CPU."""
        return isinstance(self.by, CppPasses)

    @property
    def has_program(self) -> bool:
        return not isinstance(self.by, TorchPasses) or isinstance(self.own, Through)

    @property
    def launches(self) -> int:
        """Launches of our own kernels in the forward pass."""
        return len(launches(self.program.forward)) if self.has_program else 0

    @property
    def moved_bytes(self) -> int:
        """Predicted bytes of memory traffic. On a CPU a slab stays in cache and does not count."""
        if self.has_program:
            return traffic(self.program.forward)
        again = 2 * self.value.bytes * (len(self.passes) - 1) if self.slabs == 1 else 0
        return compulsory_bytes(self.chain, self.problem) + again

    @property
    def eager_bytes(self) -> int:
        """The same for eager PyTorch, which writes and reads every value."""
        return compulsory_bytes(self.chain, self.problem) + 2 * self.value.bytes * len(self.chain.steps)

    @property
    def slab(self) -> int:
        """Samples per slab."""
        return self.by.slab if isinstance(self.by, TorchPasses) else self.input.shape[0]

    @property
    def slabs(self) -> int:
        return -(-self.input.shape[0] // self.slab)

    @property
    def slab_bytes(self) -> int:
        """Bytes of the chain's first value that are in memory at a time."""
        if isinstance(self.own, Through) or (self.own is not None and self.is_discarded):
            return 0
        return self.value.bytes * self.slab // self.input.shape[0]

    @property
    def norm(self) -> Normalize | None:
        """The norm among the fused steps."""
        return fused_norm(self.chain)

    @property
    def is_by_rows(self) -> bool:
        """Whether the last pass goes over rows: a layer_norm's, or a linear layer's features."""
        return rows_from(self.chain) is not None

    @property
    def turns(self) -> bool:
        """Whether the last pass writes a contiguous result from a channels-last value, as PyTorch's norm or pool does.

        Also if PyTorch's operators follow: its next norm would convert, and its batch_norm would keep channels-last.
        """
        return (self.value.layout, self.result_layout) == ("channels_last", "contiguous")

    @property
    def is_discarded(self) -> bool:
        """Whether only moments of the first value are kept."""
        sink = self.passes[-1].sink
        return isinstance(sink, KeepMoments) and not sink.stores

    @property
    def keeps_value(self) -> bool:
        """Whether the backward pass reads the first value, so that the last pass must not overwrite it."""
        return self.trains and not self.gradients.is_lean and not self.gradients.from_result

    @property
    def over_channels(self) -> OverChannels | None:
        """What the last pass does over channels."""
        return over_channels(self.chain) if self.passes[-1].last > last_fused_step(self.chain) else None

    @property
    def channels_end(self) -> Reduce | None:
        """The reduction over channels that the last pass ends in."""
        found = self.over_channels
        step = None if found is None or found.reduce is None else self.chain.steps[found.reduce - 1]
        return step if isinstance(step, Reduce) else None

    @property
    def pool(self) -> FusedPool | None:
        """The pool of the last pass, which only elementwise steps follow."""
        return fused_pool(self.chain)

    @property
    def resumes_at(self) -> int:
        """The first step of the last pass if a stored value is its start; 0 if it starts from the convolution's
        result."""
        sink = self.passes[0].sink
        is_finished = sink.finished if isinstance(sink, KeepMoments) else sink == Store()
        return self.passes[-1].first if is_finished and len(self.passes) > 1 else 0

    def __str__(self) -> str:
        return "; ".join((*self.describe(), *self.reasons))

    def describe(self) -> list[str]:
        """One line per pass, as `postlude explain` prints them."""
        lines = []
        before = "slab" if self.slabs > 1 else "input" if self.chain.producer is None else "value in memory"
        for number, item in enumerate(self.passes, 1):
            source = before if item.source == "load" else str(self.chain.producer)
            if item.source == "own convolution":
                source += f" [{self.own}]"
            words = self.chain.words()[item.first - 1 : item.last]
            sink = "store" if isinstance(item.sink, Keep) and self.slabs == 1 else str(item.sink)
            lines.append(f"pass {number}: " + " → ".join([source, *words, sink]))
        return lines

    def describe_training(self) -> list[str]:
        """What the forward pass keeps, and who computes the convolution's gradients; empty in inference."""
        if not self.trains:
            return []
        count = len(launches(self.program.backward))
        lines = [f"keeps {self._kept()} for its gradients, which take {count} launches of Postlude's kernels"]
        if self.chain.producer is None:
            return lines
        if self.gradients.of_both is not None:
            return [*lines, "gradients of input and weight: one kernel of Postlude's"]
        dx, dw = self.gradients.of_input, self.gradients.of_weight
        weight = None
        if dw is not None:
            tiles = f"tiles of {dw.rows} × {dw.columns} × {dw.block_k}"
            weight = f"matrix product over positions of {dw.arithmetic}; {tiles}"
        for name, ours in (("input", dx), ("weight", weight)):
            lines.append(f"gradient of the {name}: " + ("PyTorch's" if ours is None else f"ours, {ours}"))
        return lines

    def _kept(self) -> str:
        if self.gradients.from_result:
            return "nothing but the result"
        if self.gradients.is_lean or isinstance(self.own, Through) or self.is_discarded:
            return "nothing of the convolution's size"
        return "the input" if self.chain.producer is None else "the convolution's result"


@dataclass(frozen=True)
class Refusal:
    """The chain runs through PyTorch's own operators, for these reasons."""

    reasons: tuple[str, ...]
    library_tf32: bool | None = None  # as in a plan

    def __str__(self) -> str:
        return "; ".join(self.reasons)
