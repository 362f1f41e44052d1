"""An examination for one reference: its cases, the questions they become, and the right answers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from postlude.check.budget import Measured
from postlude.check.compare import Quantities, cotangent, is_output
from postlude.check.exam.bounds import BoundWatch, listed
from postlude.check.exam.cases import Case, can_be_spoiled, cases_for, inputs_of, state_of
from postlude.check.exam.rules import Rules
from postlude.check.exam.shapes import DECLARED, WORKING, Shape, in_layout, shapes_of
from postlude.check.exam.truths import Known, Truths
from postlude.check.nested import tensors_in
from postlude.check.operations import Operations
from postlude.check.points import inputs_like, producer_biases, random_state
from postlude.check.sides import Question, UnanswerableError, Wants

# Stretches of inputs and of parameter vectors, tried in turn until values lie on both sides of every bound.
STRETCHES = ((4.0, 1.0), (16.0, 1.0), (64.0, 1.0), (1.0, 3.0), (1.0, 10.0), (16.0, 10.0), (0.1, 0.3))
SHIFTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)  # of producers' biases
BOUND_SEEDS = 500
REMEMBERED = 1 << 22  # elements of inputs: the answers at larger shapes are computed again
# Bytes for one element of inputs and results on a CPU, of both processes: a softmax of 2²⁶ elements takes 27.
HELD = 28
# The cost of one point in calls of the reference: its call, the candidate's, drawing, sending and comparing.
COMPARING = 6.0


@dataclass
class Sheet:
    """One case as it is asked: its question, and the right answers once they are known."""

    case: Case
    question: Question
    known: Known | None = None
    measured: dict[str, Measured] | None = None  # when it was first asked, of whichever candidate


@dataclass(frozen=True)
class Call:
    """One call of the reference."""

    seconds: float
    operations: int
    outputs: Quantities  # of zeros: shapes and dtypes only

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self.outputs.values())


class Exam:
    """An examination, made once for a reference; with `remember`, all candidates get the same questions."""

    def __init__(self, reference: nn.Module, inputs: Sequence[Any], rules: Rules, remember: bool = False) -> None:
        self.rules = rules
        self.reference = reference
        self.trains = reference.training
        self.truths = Truths(reference, inputs, rules.precision)
        self.left_out: list[str] = []
        self._calls: dict[tuple[Any, ...], Call] = {}  # the last one at each size of the inputs
        self._remember = remember
        self._has_bias = bool(producer_biases(reference))
        self._sheets: dict[tuple[Any, ...], Sheet] = {}
        with torch.random.fork_rng(devices=[]):
            self.shapes = self._shapes(list(inputs))
            self.truths.takes_other_integers = self._takes_other_integers()
            self.range = self._range()
            floating = sum(map(can_be_spoiled, tensors_in(self.shapes[WORKING].inputs)))
            cases = cases_for(list(self.shapes), rules.seeds, rules.seed, rules.backward, floating)
            self.cases = [case for case in cases if self._can_be_asked(case)]
            self.cases += self._bound_cases()

    def sheet(self, case: Case) -> Sheet:
        """A case's question: new random numbers for each candidate unless it is cached."""
        key = (case.name, case.seed, case.shape, case.attempt)
        if key in self._sheets:
            return self._sheets[key]
        question = self._question(case)
        if question.backward:
            question = self.truths.spared(question)
            # Autograd may hand a backward pass a gradient of any strides.
            weights = (weight if weight is None else in_layout(case.shape, weight) for weight in question.cotangents)
            question = replace(question, cotangents=tuple(weights))
        made = Sheet(case, question)
        if self._remember and self.shapes[case.shape].elements <= REMEMBERED:
            self._sheets[key] = made
        return made

    def known(self, sheet: Sheet) -> Known:
        if sheet.known is None:
            sheet.known = self.truths.known(sheet.question, sheet.case.nulls)
        return sheet.known

    def why_raises(self, question: Question) -> str | None:
        """Why the reference itself cannot answer; None if it can."""
        try:
            self.truths.own(question)
        except UnanswerableError as error:
            return str(error)
        return None

    def expected_seconds(self, shape: str) -> float:
        """The expected time for a shape not asked yet: the reference's time there, and the truth's share at the last
        point."""
        own, exact = self.truths.seconds
        share = exact / own if own else 1.0
        seconds = self._call_at(self.shapes[shape].inputs).seconds
        return seconds * (share + COMPARING) * (3.0 if self.rules.backward else 1.0)

    def needed_bytes(self, shape: str) -> float:
        """Memory of the host for a point at this shape: about as much as for a softmax."""
        return HELD * (self.shapes[shape].elements + self._call_at(self.shapes[shape].inputs).elements)

    @property
    def has_products(self) -> bool:
        """Whether the reference has convolutions, linear layers or other matrix products."""
        return any(call.operations for call in self._calls.values())

    def ignored_parameters(self, case: Case) -> list[str]:
        """Parameters that do not affect the result at a point; each is replaced by new random numbers in turn."""
        question = replace(self._question(case), wants="none")
        other = random_state(self.reference, case.state_seed + 1)
        truth, found = self.truths.exact(question), []
        for name, _ in self.reference.named_parameters():
            changed = self.truths.exact(replace(question, state={**question.state, name: other[name]}))
            moved = [_relative(changed[one], truth[one]) for one in truth if is_output(one)]
            found += [name] if max(moved) < torch.finfo(self.truths.dtype).eps / 8 else []
        return found

    def _shapes(self, inputs: list[Any]) -> dict[str, Shape]:
        if self.rules.declared_only:
            self._cost(inputs)
            return {WORKING: Shape(WORKING, inputs)}
        found, self.left_out = shapes_of(inputs, self._cost)
        if _layouts(found[WORKING].inputs) == _layouts(found[DECLARED].inputs):
            del found[DECLARED]  # the working shape is the declared one
        return found

    def _takes_other_integers(self) -> bool:
        """Whether the reference accepts its integers in another order, as it does with labels and most indices."""
        given = self.shapes[WORKING].inputs
        if all(tensor.is_floating_point() for tensor in tensors_in(given)):
            return False
        other = inputs_like(given, "normal", 0, shuffles_integers=True)
        why = self.why_raises(Question(self.reference.state_dict(), other, 0, self.trains))
        if why is not None:
            self.left_out.append(f"other integers than the file's: {why}")
        return why is None

    def _cost(self, inputs: list[Any]) -> tuple[float, int]:
        call = self._call(inputs)
        return call.operations, call.elements

    def _call_at(self, inputs: list[Any]) -> Call:
        """A call at the sizes of these inputs, in whichever layout."""
        return self._calls.get(_sizes(inputs)) or self._call(inputs)

    def _call(self, inputs: list[Any]) -> Call:
        begin = time.monotonic()
        with Operations() as operations:
            own = self.truths.own(Question(self.reference.state_dict(), inputs, 0, self.trains))
        seconds = time.monotonic() - begin
        blank = {name: one.new_zeros(()).expand(one.shape) for name, one in own.items() if is_output(name)}
        found = self._calls[_sizes(inputs)] = Call(seconds, operations.count, blank)
        return found

    def _question(self, case: Case) -> Question:
        template = self.shapes[case.shape].inputs
        inputs = inputs_of(case, template, self.range, self._has_bias, self.truths.takes_other_integers)
        training = self.trains != case.flipped
        wants: Wants = case.wants or ("all" if self.rules.backward and not case.is_nonfinite else "none")
        question = Question(state_of(case, self.reference), inputs, case.seed, training, wants)
        weights = self._cotangents(inputs, case.seed) if question.backward else ()
        return replace(question, cotangents=weights, unaligned=case.unaligned)

    def _can_be_asked(self, case: Case) -> bool:
        """Whether the reference has the gradients of a point that asks for some of them only."""
        return case.wants not in ("inputs", "parameters") or self.why_raises(self._question(case)) is None

    def _cotangents(self, inputs: list[Any], seed: int) -> tuple[Any, ...]:
        """One per output; those without a gradient get one that is not used."""
        return tuple(cotangent(one, seed) for one in self._call_at(inputs).outputs.values())

    def _range(self) -> tuple[float, float] | None:
        """The range of the file's own inputs, where others give NaN or infinity: logarithms, long products."""
        given, drawn = Case("given", "given"), Case("drawn")
        self.range = None
        if self._finite(drawn) or not self._finite(given):
            return None
        tensors = [t for t in tensors_in(self.shapes[WORKING].inputs) if t.is_floating_point()]
        low, high = min(float(t.min()) for t in tensors), max(float(t.max()) for t in tensors)
        self.left_out.append(f"inputs outside [{low:g}, {high:g}]: the reference gives NaN or infinity there")
        return low, high

    def _finite(self, case: Case) -> bool:
        question = replace(self._question(case), wants="none")
        found = [*self.truths.exact(question).items(), *self.truths.own(question).items()]
        return all(bool(torch.isfinite(one).all()) for name, one in found if is_output(name))

    def _bound_cases(self) -> list[Case]:
        """Further points, if at the planned ones all values lie on one side of some bound of the reference."""
        watch = self._watched(self.cases[0])
        missing = set(watch.shares) - watch.reached
        found: list[Case] = []
        for stretch, state_stretch in STRETCHES:
            if not missing:
                break
            case = self._bound_case(stretch=stretch, state_stretch=state_stretch)
            now = self._watched(case).reached & missing
            if now:
                found.append(case)
                missing -= now
        if missing:
            self.left_out.append(f"values on both sides of {listed(missing)}: no point was found that has them")
        if self._has_bias and any(bound.value for bound in watch.shares):
            found += [case for side in (-1.0, 1.0) for case in self._nearly_all_beyond(side)]
        return found

    def _nearly_all_beyond(self, side: float) -> list[Case]:
        """A point with few values left on the other side of a bound: reductions may hide the bound elsewhere."""
        for size in SHIFTS:
            case = self._bound_case(state_shift=side * size)
            if self._watched(case).has_few(above=side < 0):
                return [case]
        return []

    def _bound_case(self, **how: float) -> Case:
        seed = self.rules.seed + BOUND_SEEDS
        return replace(Case("bounds", seed=seed, state_seed=seed), **how)  # type: ignore[arg-type]

    def _watched(self, case: Case) -> BoundWatch:
        question, watch = replace(self._question(case), wants="none"), BoundWatch()
        with watch:
            self.truths.exact(question)
        return watch


def _sizes(inputs: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(inputs))


def _layouts(inputs: list[Any]) -> list[Any]:
    return [(tensor.shape, tensor.stride()) for tensor in tensors_in(inputs)]


def _relative(changed: torch.Tensor, truth: torch.Tensor) -> float:
    if not truth.is_floating_point():
        return 0.0 if torch.equal(changed, truth) else math.inf
    difference = float((changed - truth).nan_to_num().abs().max()) if truth.numel() else 0.0
    return difference / max(float(truth.nan_to_num().abs().max()), 1e-300)
