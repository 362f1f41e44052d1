"""What a chain's implementation is compared with at one point: PyTorch, float64, and float64 of rounded operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Chain
from postlude.check.compare import GRADIENT, Quantities, cotangent
from postlude.check.kinks import Kinks, Meeting, all_ambiguous, either_side, spared
from postlude.check.modes import FORMATS, RoundedOperands, in_double, library_unsearched, pytorch_switches
from postlude.check.nulls import chain_nulls
from postlude.reference import evaluate, first_value

Run = Callable[[Chain, Sequence[Tensor]], Tensor]
Backward = bool | Sequence[bool]
Meetings = Sequence[Meeting]


@dataclass(frozen=True)
class Asked:
    """What is judged, and how, at all points alike."""

    run: Run
    chain: Chain
    mode: str
    backward: Backward
    tells_infinities: bool | None  # None: no point that is not finite
    # None leaves out the errors that cost more. Else this is how PyTorch runs: `by_pytorch`, or with the samples that
    # the implementation adds to a point's own.
    among: Run | None = None


@dataclass(frozen=True)
class Evaluation:
    """One forward call: its leaves and its result, from which gradients are taken later."""

    chain: Chain
    leaves: list[Tensor]
    output: Tensor

    def quantities(self, weights: Tensor | None) -> Quantities:
        """The output, the updated running statistics, and the gradients of the slots that need one."""
        found: Quantities = {"output": self.output.detach()}
        if weights is not None:
            wanted = [slot for slot, leaf in enumerate(self.leaves) if leaf.requires_grad]
            sources = [self.leaves[slot] for slot in wanted]
            weights = weights.to(self.output.dtype)
            gradients: Sequence[Any] = torch.autograd.grad(self.output, sources, weights, allow_unused=True)
            for slot, gradient in zip(wanted, gradients, strict=True):
                if gradient is not None:
                    found[f"{GRADIENT}slot {slot} ({self.chain.roles[slot]})"] = gradient
        # Read after the gradients, because a backward pass must not update them again.
        found.update({f"slot {slot} (running)": self.leaves[slot].detach() for slot in self.chain.moved})
        return found


def evaluated(run: Callable[..., Tensor], chain: Chain, tensors: Sequence[Tensor], backward: Backward) -> Evaluation:
    with nullcontext() if backward else torch.no_grad():
        wants = [backward] * len(tensors) if isinstance(backward, bool) else backward
        leaves = [
            tensor.detach().clone() if slot in chain.moved else tensor.detach().requires_grad_(want)
            for slot, (tensor, want) in enumerate(zip(tensors, wants, strict=True))
        ]
        return Evaluation(chain, leaves, run(chain, leaves))


class Copies:
    """Copies of a point's tensors: as they were given, and in float64.

    Those of the weight are kept for the next points, which may have the same one. Others are new at each point.
    """

    def __init__(self, chain: Chain) -> None:
        self.roles = chain.roles
        self.kept: tuple[Tensor, Tensor, Tensor] | None = None  # the weight, and its copies

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [self._of(tensor, role) for tensor, role in zip(tensors, self.roles, strict=True)]
        return [before for before, _ in pairs], [double for _, double in pairs]

    def _of(self, tensor: Tensor, role: str) -> tuple[Tensor, Tensor]:
        if self.kept is not None and self.kept[0] is tensor:
            return self.kept[1:]
        before = tensor.clone()
        double = before.double()
        if role == "weight":
            self.kept = (tensor, before, double)
        return before, double


class Sides:
    """What the candidate is compared with at one point: PyTorch, float64, and float64 with rounded operands."""

    def __init__(self, asked: Asked, tensors: Sequence[Tensor], doubles: list[Tensor]) -> None:
        self.chain, self.mode, self.backward = asked.chain, asked.mode, asked.backward
        self.device = tensors[0].device
        self.doubles = doubles
        with self._as_pytorch():
            self.own, self.own_kinks = self._watched(by_pytorch, tensors)
            self.among = None
            if asked.among is not None and asked.among is not by_pytorch:
                self.among = evaluated(asked.among, self.chain, tensors, self.backward)
        with in_double(self.device):
            self.truth, self.kinks = self._watched(self._true, doubles)
        self.rounded: Evaluation | None = None
        self.rounded_kinks: Meetings | None = None
        if asked.among is not None and FORMATS[self.mode] is not None:
            with self._rounding():
                self.rounded, self.rounded_kinks = self._watched(exactly, doubles)

    def cotangents(self, seed: int) -> tuple[Tensor, list[Tensor] | None]:
        """A weight for each output, and the elements at a kink that a gradient still reaches."""
        weights = cotangent(self.own.output, seed, product_dtype(self.chain, self.own.leaves))
        others = [self.own_kinks] if self.rounded_kinks is None else [self.own_kinks, self.rounded_kinks]
        near = all_ambiguous(self.kinks, *others)
        return (weights, None) if near is None else spared(self.truth.output, self.kinks, near, weights)

    def quantities(self, weights: Tensor | None) -> tuple[Quantities, Quantities, Quantities | None]:
        with self._as_pytorch():
            own = (self.among or self.own).quantities(weights)
        with in_double(self.device):
            truth = self.truth.quantities(weights)
        if self.rounded is None:
            return own, truth, None
        with self._rounding():
            return own, truth, self.rounded.quantities(weights)

    def flipped(self, left: Sequence[Tensor], weights: Tensor | None) -> tuple[Quantities, ...]:
        """The truth with those elements on either side of their kink."""
        found = []
        for shift in either_side(self.kinks, left):
            with in_double(self.device), Kinks(shift):
                found.append(evaluated(exactly, self.chain, self.doubles, self.backward))
        with in_double(self.device):
            return tuple(call.quantities(weights) for call in found)

    def nulls(self, seed: int) -> dict[str, Quantities]:
        with torch.no_grad(), in_double(self.device):
            return chain_nulls(self.chain, self.doubles, self._start, seed)

    def _true(self, chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        """The truth; its first value is kept for null candidates, which need no second convolution then."""
        start = first_value(chain, tensors, torch.float64)
        self._start = start.detach()
        return evaluate(chain, tensors, dtype=torch.float64, moves=True, start=start)

    def _watched(self, run: Run, tensors: Sequence[Tensor]) -> tuple[Evaluation, Meetings]:
        """A forward call, and the kinks that it meets if gradients are taken."""
        kinks = Kinks()
        with kinks if self.backward else nullcontext():
            return evaluated(run, self.chain, tensors, self.backward), kinks.meetings

    @contextmanager
    def _as_pytorch(self) -> Iterator[None]:
        with pytorch_switches(self.mode, self.device), library_unsearched():
            yield

    @contextmanager
    def _rounding(self) -> Iterator[None]:
        with in_double(self.device), RoundedOperands(FORMATS[self.mode] or ""):
            yield


def in_single(chain: Chain, tensors: Sequence[Tensor], weights: Tensor | None) -> tuple[Quantities, Quantities]:
    """PyTorch in float32 and the truth for the same rounded tensors."""
    singles = [tensor.float() for tensor in tensors]
    doubles = [one.double() for one in singles]
    own, exact = (
        evaluated(*one, weights is not None) for one in ((by_pytorch, chain, singles), (exactly, chain, doubles))
    )
    return own.quantities(weights), exact.quantities(weights)


def exactly(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    return evaluate(chain, tensors, dtype=torch.float64, moves=True)


def by_pytorch(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    return evaluate(chain, tensors, moves=True)


def product_dtype(chain: Chain, tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype in which the convolution multiplies: autocast's, if there is one."""
    if chain.producer is not None and chain.producer.dtype is not None:
        dtype: torch.dtype = getattr(torch, chain.producer.dtype)
        return dtype
    return tensors[0].dtype
