"""Tests the examination itself: mutants of the reference take it like any candidate, and all of them must fail."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from postlude.check.compare import Progress, Quantities
from postlude.check.exam.exam import Exam
from postlude.check.exam.examine import examine
from postlude.check.exam.mutations import Args, Change, changes_of
from postlude.check.exam.shapes import DECLARED
from postlude.check.exam.truths import as_doubles
from postlude.check.interception import Interception
from postlude.check.modes import pytorch_switches
from postlude.check.sides import Answer, CandidateError, Question, Side, StateKeys, keys_of
from postlude.errors import first_line

# Operators that only move, copy or allocate; mistakes in them show as mistakes of their neighbours.
_NOT_COMPUTING = frozenset(
    {
        *("alias", "arange", "as_strided", "bernoulli", "clone", "contiguous", "copy", "detach"),
        *("empty", "empty_like", "expand", "fill", "full", "full_like", "lift_fresh", "ones"),
        *("ones_like", "permute", "repeat", "reshape", "select", "slice", "split", "squeeze", "t"),
        *("to_copy", "transpose", "unsafe_view", "unsqueeze", "view", "zeros", "zeros_like"),
    }
)
FINE = ("half precision", "tanh's form")  # invisible, or no mistake, in a precision coarser than fp32
SAME = 1e-9  # of the truth's largest value; a smaller change counts as none
TIMES_BUDGET = 4.0  # time for all mutants together, in time budgets of one candidate


@dataclass(frozen=True)
class Mutation:
    call: int  # the number of the operator call in the reference's forward
    operator: str
    name: str
    change: Change

    def __str__(self) -> str:
        return f"{self.operator.removeprefix('native_').removeprefix('_')}: {self.name}"


@dataclass(frozen=True)
class SelfCheck:
    """The names of mutants by outcome."""

    rejected: tuple[str, ...]
    accepted: tuple[str, ...]
    unchanged: tuple[str, ...]  # not mistakes for this model: they change nothing in float64 at any point
    left_out: int

    def __str__(self) -> str:
        told = len(self.rejected) + len(self.accepted)
        text = f"{len(self.rejected)} of {told} mutants of the reference rejected"
        if self.accepted:
            text += f"; accepted: {', '.join(self.accepted)}"
        if self.unchanged:
            text += f"; not mistakes here, because float64 shows no difference: {', '.join(self.unchanged)}"
        return text + (f"; {self.left_out} left out for lack of time" if self.left_out else "") + "."

    def as_dict(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in ("rejected", "accepted", "unchanged")}
        return {**lists, "left_out": self.left_out}


class _Calls(Interception):
    """Passes every computing call with its number to `seen`, and returns its result."""

    def __init__(self, seen: Callable[[int, str, Callable[..., Any], Args], Any]) -> None:
        super().__init__()
        self._seen = seen
        self._number = -1

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        operator = name.removesuffix("_")

        def run(*given: Any) -> Any:
            return func(*given, **kwargs)

        if operator.removeprefix("_") in _NOT_COMPUTING or not _has_floats(args):
            return run(*args)
        self._number += 1
        if not name.endswith("_"):
            return self._seen(self._number, operator, run, args)
        # In place: the mistake is made on a copy and then written to the operator's target.
        copied = (args[0].clone(), *args[1:])
        made = self._seen(self._number, operator, run, copied)
        return args[0].copy_(made) if isinstance(made, Tensor) else made


def self_check(exam: Exam, progress: Progress = None) -> SelfCheck:
    """Runs the examination on every mutant; `exam` should cache its right answers."""
    rejected: list[str] = []
    accepted: list[str] = []
    unchanged: list[str] = []
    begun, limit = time.monotonic(), TIMES_BUDGET * exam.rules.seconds
    mutations = mutations_of(exam)
    # Mistakes of one operator show at any size; the declared one is for mistakes of tiles and grids.
    cases = [case for case in exam.cases if case.shape != DECLARED]
    done = 0
    for done, mutation in enumerate(mutations, 1):
        if time.monotonic() - begun > limit:
            done -= 1
            break
        verdict = examine(exam, MutantSide(exam, mutation), cases=cases)
        if verdict.outcome == "wrong":
            rejected.append(str(mutation))
        else:
            (unchanged if _changes_nothing(exam, mutation) else accepted).append(str(mutation))
        if progress:
            progress(f"mutant {done} of {len(mutations)} ({mutation})")
    return SelfCheck(tuple(rejected), tuple(accepted), tuple(unchanged), len(mutations) - done)


def mutations_of(exam: Exam) -> list[Mutation]:
    """Every change of every operator call in the reference's forward, at the first point."""
    found: list[Mutation] = []

    def seen(number: int, operator: str, run: Callable[..., Any], args: Args) -> Any:
        result = run(*args)
        made = [*changes_of(operator, args), *_generic(args, result)]
        found.extend(Mutation(number, operator, name, change) for name, change in made)
        return result

    side, question = Side(copy.deepcopy(exam.reference)), exam.sheet(exam.cases[0]).question
    with _Calls(seen):
        side.ask(replace(question, wants="none"))
    if exam.truths.mode == "fp32":
        return found
    return [one for one in found if not any(word in one.name for word in FINE)]


class MutantSide:
    """The reference with one call changed, in this process."""

    def __init__(self, exam: Exam, mutation: Mutation) -> None:
        self._truths = exam.truths
        self._side = Side(copy.deepcopy(exam.reference))
        self._mutation = mutation
        self._kept: Quantities = {}

    def state_keys(self) -> StateKeys:
        return keys_of(self._side.module)

    def ask(self, question: Question, *, keep: bool = False) -> Answer:
        with pytorch_switches(self._truths.mode, self._truths.device):
            try:
                found = mutated(self._side, question, self._mutation)
            except Exception as error:
                raise CandidateError(f"the mutant raised {first_line(error)}") from error
        if keep:
            self._kept = found
        return Answer(found)

    def kept(self) -> Quantities:
        return self._kept


def mutated(side: Side, question: Question, mutation: Mutation) -> Quantities:
    def seen(number: int, operator: str, run: Callable[..., Any], args: Args) -> Any:
        if number != mutation.call or operator != mutation.operator:
            return run(*args)
        return mutation.change(run, args)

    with _Calls(seen):
        return side.ask(question)


def _changes_nothing(exam: Exam, mutation: Mutation) -> bool:
    side = Side(copy.deepcopy(exam.reference).double())
    for case in exam.cases:
        if case.shape == DECLARED or case.is_nonfinite:
            continue
        sheet = exam.sheet(case)
        truth = exam.known(sheet).truth
        found = mutated(side, replace(as_doubles(sheet.question), wants="none"), mutation)
        for name, values in found.items():
            scale = float(truth[name].nan_to_num().abs().max()) if truth[name].numel() else 0.0
            if float((values - truth[name]).nan_to_num().abs().max()) > SAME * scale:
                return False
    return True


def _generic(args: Args, result: Any) -> Iterator[tuple[str, Change]]:
    """Mistakes for any operator: it is left out, or its result is misplaced, truncated or rounded."""
    output = result[0] if isinstance(result, tuple) else result
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() < 1:
        return
    first = args[0] if isinstance(args[0], Tensor) else None
    if first is not None and first.shape == output.shape:
        yield "left out", _left_out(0)
    elif isinstance(args[1] if len(args) > 1 else None, Tensor) and args[1].shape == output.shape:
        yield "left out", _left_out(1)
    for axis, name in ((0, "samples permuted"), (1, "channels permuted"), (-1, "shifted by one place")):
        if axis < output.dim() and output.shape[axis] > 1 and (axis >= 0 or output.dim() > 2):
            yield name, _rolled(axis)
    if output.shape[-1] > 1:
        yield "border left out", lambda run, a: _after(run(*a), _without_border)
    if output.numel() > 1:
        yield "second half left out", lambda run, a: _after(run(*a), _without_second_half)
    yield "rounded to half precision", lambda run, a: _after(run(*a), lambda y: y.half().to(y.dtype))


def _left_out(place: int) -> Change:
    def change(run: Callable[..., Any], args: Args) -> Any:
        before = args[place].clone()  # the operator may write into it
        return _in_place_of(run(*args), before)

    return change


def _rolled(axis: int) -> Change:
    return lambda run, args: _after(run(*args), lambda output: output.roll(1, axis))


def _after(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return _in_place_of(result, change(result[0] if isinstance(result, tuple) else result))


def _in_place_of(result: Any, output: Tensor) -> Any:
    return (output, *result[1:]) if isinstance(result, tuple) else output


def _without_border(output: Tensor) -> Tensor:
    changed = output.clone()
    changed[..., -1] = 0
    return changed


def _without_second_half(output: Tensor) -> Tensor:
    changed = output.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[output.numel() // 2 :] = 0
    return changed


def _has_floats(args: Args) -> bool:
    return any(isinstance(arg, Tensor) and arg.is_floating_point() for arg in args)
