"""The right answers (PyTorch's own, float64, float64 with rounded operands), and answers that must be rejected."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from postlude.check.compare import Quantities
from postlude.check.kinks import Kinks, all_ambiguous, either_side, few, spared
from postlude.check.modes import FORMATS, RoundedOperands, has_no_convolution, pytorch_switches, resolve
from postlude.check.nested import map_tensors, tensors_in
from postlude.check.points import inputs_like, random_state
from postlude.check.same_draws import SameDraws
from postlude.check.sides import Question, Side, UnanswerableError
from postlude.errors import first_line

OTHER = 10_000  # added to a seed for another input or other parameters


@dataclass(frozen=True)
class Known:
    """Everything about one point that does not depend on the candidate."""

    own: Quantities
    truth: Quantities
    rounded: Quantities | None  # in float64 with rounded operands, where the precision mode rounds them
    single: tuple[Quantities, Quantities] | None
    nulls: dict[str, Quantities]
    flipped: tuple[Quantities, ...] = ()  # the truth with elements at a kink on one side, and on the other


class Truths:
    """A reference, copied: as it is, and in float64."""

    def __init__(self, reference: nn.Module, inputs: Sequence[Any], precision: str) -> None:
        self.reference = reference
        self.own_side = Side(copy.deepcopy(reference))
        self.exact_side = Side(copy.deepcopy(reference).double())
        self.device = _device_of(reference, inputs)
        self.dtype = _dtype_of(reference, inputs)
        self._one_at_a_time = threading.Lock()  # candidates in several threads may share a reference
        self.seconds = 0.0, 0.0  # of PyTorch's and the truth's last answers
        self.mode = resolve(precision, self.dtype, self.device, has_no_convolution(reference))
        self.takes_other_integers = False  # set when the reference has been seen to accept them in another order

    def known(self, question: Question, with_nulls: bool = False) -> Known:
        begin = time.monotonic()
        own = self.own(question)
        asked = time.monotonic()
        truth = self.exact(question, own)
        self.seconds = asked - begin, time.monotonic() - asked
        rounded, form = None, FORMATS[self.mode]
        if form is not None:
            with RoundedOperands(form):
                rounded = self.exact(question, own)
        nulls = self._nulls(question) if with_nulls else {}
        return Known(own, truth, rounded, self._single(question), nulls, self._flipped(question, own))

    def own(self, question: Question) -> Quantities:
        with pytorch_switches(self.mode, self.device):
            return self._ask(self.own_side, question)

    def exact(self, question: Question, weigh_like: Quantities | None = None) -> Quantities:
        """The truth: the answer in float64."""
        return self._ask(self.exact_side, as_doubles(question), weigh_like)

    def spared(self, question: Question) -> Question:
        """The question with cotangents by which, as far as possible, no gradient reaches elements at a kink.

        If several results have gradients, none is spared, and the truth is computed with such elements on either side.
        """
        exact = as_doubles(question)
        answer: Quantities = {}
        try:
            with torch.no_grad(), pytorch_switches(self.mode, self.device), Kinks() as own:
                answer = self._forward(self.own_side, question)
            with Kinks() as true:
                outputs = self._forward(self.exact_side, exact)
            sides, form = [own.meetings], FORMATS[self.mode]
            if form is not None:
                with torch.no_grad(), RoundedOperands(form), Kinks() as rounded:
                    self._forward(self.exact_side, exact)
                sides.append(rounded.meetings)
            near = all_ambiguous(true.meetings, *sides)
        except UnanswerableError:
            return question
        finally:
            _erase(answer)  # the candidate runs later, perhaps in this memory
        if near is None:
            return question
        roots = [place for place, output in enumerate(outputs.values()) if output.requires_grad]
        weights, left = list(question.cotangents), few([one.likely for one in near])
        first = weights[roots[0]] if len(roots) == 1 and len(weights) == len(outputs) else None
        if first is not None:
            weights[roots[0]], left = spared(list(outputs.values())[roots[0]], true.meetings, near, first)
        shifts = () if left is None else tuple(either_side(true.meetings, left))
        return replace(question, cotangents=tuple(weights), shifts=shifts)

    def _flipped(self, question: Question, own: Quantities) -> tuple[Quantities, ...]:
        found = []
        for shift in question.shifts:
            with Kinks(shift):
                found.append(self.exact(question, own))
        return tuple(found)

    def _single(self, question: Question) -> tuple[Quantities, Quantities] | None:
        """PyTorch in float32 and its truth, for float64 data: there PyTorch is the truth, and this tells its error."""
        if self.dtype != torch.float64:
            return None
        rounded = map_tensors(as_dtype(torch.float32), question.state)
        singles = replace(question, state=rounded, inputs=map_tensors(as_dtype(torch.float32), question.inputs))
        own = self._ask(Side(copy.deepcopy(self.reference).float()), singles)
        return own, self.exact(singles, own)

    def _nulls(self, question: Question) -> dict[str, Quantities]:
        """The truth for another input and for other parameters. If one passes, the result does not depend on them."""
        asked = replace(as_doubles(question), wants="none")
        shuffles = self.takes_other_integers
        other = inputs_like(asked.inputs, "hierarchical", question.seed + OTHER, shuffles_integers=shuffles)
        nulls = {"the answer for another input": self.exact(replace(asked, inputs=other))}
        if any(True for _ in self.reference.parameters()):
            changed = random_state(self.reference, question.seed + OTHER)
            nulls["the answer for other parameters"] = self.exact(replace(asked, state=changed))
        return nulls

    def _ask(self, side: Side, question: Question, weigh_like: Quantities | None = None) -> Quantities:
        return self._called(side, question, lambda asked: side.ask(asked, weigh_like))

    def _forward(self, side: Side, question: Question) -> Quantities:
        return self._called(side, question, lambda asked: side.forward(asked)[1])

    def _called(self, side: Side, question: Question, call: Callable[[Question], Quantities]) -> Quantities:
        asked = replace(question, inputs=map_tensors(torch.clone, question.inputs))
        try:
            with self._one_at_a_time, self._drawing(side):
                return call(asked)
        except Exception as error:
            what = "the reference in float64" if side is self.exact_side else "the reference"
            raise UnanswerableError(f"{what} raised {first_line(error)}") from error

    def _drawing(self, side: Side) -> AbstractContextManager[Any]:
        return SameDraws(self.dtype) if side is self.exact_side and self.dtype != torch.float64 else nullcontext()


def _erase(answer: Quantities) -> None:
    for tensor in answer.values():
        if tensor.is_floating_point() and 0 not in tensor.stride():
            tensor.detach().fill_(math.nan)


def as_doubles(question: Question) -> Question:
    return replace(question, inputs=map_tensors(as_dtype(torch.float64), question.inputs))


def as_dtype(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor


def _dtype_of(module: nn.Module, inputs: Sequence[Any]) -> torch.dtype:
    tensors = [*module.parameters(), *tensors_in(list(inputs))]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def _device_of(module: nn.Module, inputs: Sequence[Any]) -> torch.device:
    tensors = [*tensors_in(list(inputs)), *module.parameters()]
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
