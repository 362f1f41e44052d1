"""Judges an implementation of a chain: its results against float64, PyTorch's own, and null candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from postlude.chain import Chain
from postlude.check.budget import MIN_POINTS, is_constant
from postlude.check.compare import (
    GRADIENT,
    LARGE_OFFSET,
    Answers,
    Quantities,
    Round,
    compare,
    contract_problem,
    cotangent,
    differs_in_kind,
    larger,
    nonfinite_problem,
    poison,
    same_bits,
    verdict_of,
)
from postlude.check.kinks import Kinks, all_ambiguous, either_side, spared
from postlude.check.modes import FORMATS, RoundedOperands, in_double, library_unsearched, pytorch_switches, resolve
from postlude.check.nulls import chain_nulls
from postlude.check.points import ChainPoint
from postlude.check.sides import CandidateError
from postlude.check.verdict import Verdict
from postlude.errors import first_line
from postlude.reference import evaluate, first_value

Run = Callable[[Chain, Sequence[Tensor]], Tensor]
Backward = bool | Sequence[bool]
NONFINITE = (("NaN", math.nan), ("infinity", math.inf))

NULL_POINTS = 2  # at which null candidates must be rejected: each costs a convolution in float64
_T = TypeVar("_T")


def verify_chain(
    run: Run,
    chain: Chain,
    points: Iterable[ChainPoint | Sequence[Tensor]],
    precision: str = "auto",
    *,
    backward: Backward = False,
    nonfinite: bool = True,
    tells_infinities: bool = True,
    least: int = MIN_POINTS,
    among: Run | None = None,
) -> Verdict:
    """Judges `run` on the given points (see `chain_points`), on request with gradients: for all slots, or slot by slot.

    With fewer points than `least` the verdict is "cannot tell". Two more points have a NaN or an infinity in one sample
    of the first point, which must stay there; without `tells_infinities` an infinity may be NaN, or NaN an infinity,
    which a plan's rule must say. The error of the precision itself is computed only if PyTorch's own error
    does not cover the result's: it costs as much as the truth, and most results do not need it. So is PyTorch's error
    with a point's samples `among` those that `run` adds: oneDNN's weight gradient has ten times the error for two.
    """
    given = [point if isinstance(point, ChainPoint) else ChainPoint(tuple(point)) for point in points]
    dtype, device = _product_dtype(chain, given[0].tensors), given[0].tensors[0].device
    mode = resolve(precision, dtype, device, chain.is_linear)
    findings: list[str] = []
    asked = _Asked(run, chain, mode, backward, tells_infinities if nonfinite else None)
    try:
        rounds = _rounds(asked, given, findings)
        verdict = verdict_of(rounds, findings, mode, least=least)
        if verdict.right or findings or (FORMATS[mode] is None and among is None):
            return verdict
        again = _rounds(replace(asked, among=among or _by_pytorch), given, findings)
    except CandidateError as error:
        return Verdict("wrong", (str(error),), mode)
    return verdict_of(list(map(_worse, rounds, again)), findings, mode, least=least)


@dataclass(frozen=True)
class _Asked:
    """What is judged, and how, at all points alike."""

    run: Run
    chain: Chain
    mode: str
    backward: Backward
    tells_infinities: bool | None  # None: no point that is not finite
    among: Run | None = None  # the errors that cost more are wanted, PyTorch's among the samples that this adds


def _worse(first: Round, second: Round) -> Round:
    """The second round, but with outputs no better than in the first, so that a race that shows only sometimes counts.

    Gradients are those of the second round, whose cotangents spare more elements.
    """
    points = dict(second.points)
    for name, point in second.points.items():
        if not name.startswith(GRADIENT):
            points[name] = replace(point, result=larger(first.points[name].result, point.result))
    return Round(second.family, points)


def _rounds(asked: _Asked, points: Sequence[ChainPoint], findings: list[str]) -> list[Round]:
    """One round per point, up to the first finding."""
    rounds: list[Round] = []
    for seed, point in enumerate(points):
        with_nulls = point.family != LARGE_OFFSET and sum(map(_can_tell, rounds)) < NULL_POINTS
        answers = _answers(asked, point.tensors, seed, findings, with_nulls)
        rounds.append(Round(point.family, compare(answers, findings)))
        if seed == 0 and asked.tells_infinities is not None:
            findings += _nonfinite_findings(asked, point.tensors, asked.tells_infinities)
        if findings:
            break
    return rounds


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


def _call(run: Callable[..., Tensor], chain: Chain, tensors: Sequence[Tensor], backward: Backward) -> Evaluation:
    with nullcontext() if backward else torch.no_grad():
        wants = [backward] * len(tensors) if isinstance(backward, bool) else backward
        leaves = [
            tensor.detach().clone() if slot in chain.moved else tensor.detach().requires_grad_(want)
            for slot, (tensor, want) in enumerate(zip(tensors, wants, strict=True))
        ]
        return Evaluation(chain, leaves, run(chain, leaves))


def _answers(asked: _Asked, tensors: tuple[Tensor, ...], seed: int, findings: list[str], with_nulls: bool) -> Answers:
    """The candidate runs first: memory that it is given must not hold the right result."""
    run, chain, backward = asked.run, asked.chain, asked.backward
    before = [tensor.clone() for tensor in tensors]
    called = _candidate(lambda: _call(run, chain, tensors, backward))
    sides = _Sides(asked, before)
    weights, left = sides.cotangents(seed) if backward else (None, None)
    result = _candidate(lambda: called.quantities(weights))
    if not all(same_bits(old, new) for old, new in zip(before, tensors, strict=True)):
        findings.append("the implementation changed its input tensors")
        tensors = tuple(before)
    repeated = None
    if seed == 0:
        poison(sides.own.output)
        repeated = _candidate(lambda: _call(run, chain, tensors, backward).quantities(weights))
    own, truth, bare = sides.quantities(weights)
    flipped = sides.flipped(left, weights) if left is not None else ()
    nulls = sides.nulls(tensors, seed) if with_nulls else None
    single = _single(chain, tensors, weights) if own["output"].dtype == torch.float64 else None
    return Answers(result, own, truth, bare, repeated, nulls, single, guesses=with_nulls, flipped=flipped)


def _can_tell(one: Round) -> bool:
    output = one.points.get("output")
    return one.family != LARGE_OFFSET and output is not None and not is_constant(output, output.scale.spread)


class _Sides:
    """What the candidate is compared with at one point: PyTorch, float64, and float64 with rounded operands."""

    def __init__(self, asked: _Asked, tensors: Sequence[Tensor]) -> None:
        self.chain, self.mode, self.backward = asked.chain, asked.mode, asked.backward
        chain, mode, backward, among = self.chain, self.mode, self.backward, asked.among
        self.device = tensors[0].device
        self.doubles = [tensor.double() for tensor in tensors]
        self._met = [Kinks(), Kinks(), Kinks()]
        with pytorch_switches(mode, self.device), library_unsearched(), self._watch(0):
            self.own = _call(_by_pytorch, chain, tensors, backward)
        self.among = None
        if among is not None and among is not _by_pytorch:
            with pytorch_switches(mode, self.device), library_unsearched():
                self.among = _call(among, chain, tensors, backward)
        with in_double(self.device), self._watch(1):
            self.truth = _call(self._exactly, chain, self.doubles, backward)
        self.bare = None
        if among is not None and FORMATS[mode] is not None:
            with self._rounded(), self._watch(2):
                self.bare = _call(_in_double, chain, self.doubles, backward)

    def cotangents(self, seed: int) -> tuple[Tensor, list[Tensor] | None]:
        """A weight for each output, and the elements at a kink that a gradient still reaches."""
        weights = cotangent(self.own.output, seed, _product_dtype(self.chain, self.own.leaves))
        own, exact, bare = (kinks.meetings for kinks in self._met)
        near = all_ambiguous(exact, own, *([bare] if self.bare is not None else []))
        return (weights, None) if near is None else spared(self.truth.output, exact, near, weights)

    def quantities(self, weights: Tensor | None) -> tuple[Quantities, Quantities, Quantities | None]:
        with pytorch_switches(self.mode, self.device), library_unsearched():
            own = (self.among or self.own).quantities(weights)
        with in_double(self.device):
            truth = self.truth.quantities(weights)
        if self.bare is None:
            return own, truth, None
        with self._rounded():
            return own, truth, self.bare.quantities(weights)

    def flipped(self, left: Sequence[Tensor], weights: Tensor | None) -> tuple[Quantities, ...]:
        """The truth with those elements on either side of their kink."""
        found = []
        for shift in either_side(self._met[1].meetings, left):
            with in_double(self.device), Kinks(shift):
                found.append(_call(_in_double, self.chain, self.doubles, self.backward))
        with in_double(self.device):
            return tuple(call.quantities(weights) for call in found)

    def nulls(self, tensors: Sequence[Tensor], seed: int) -> dict[str, Quantities]:
        with torch.no_grad(), in_double(self.device):
            return chain_nulls(self.chain, tensors, self._start, seed)

    def _exactly(self, chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        """The truth; its first value is kept for null candidates, which need no second convolution then."""
        start = first_value(chain, tensors, torch.float64)
        self._start = start.detach()
        return evaluate(chain, tensors, dtype=torch.float64, moves=True, start=start)

    def _watch(self, side: int) -> AbstractContextManager[Any]:
        return self._met[side] if self.backward else nullcontext()

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        with in_double(self.device), RoundedOperands(FORMATS[self.mode] or ""):
            yield


def _single(chain: Chain, tensors: Sequence[Tensor], weights: Tensor | None) -> tuple[Quantities, Quantities]:
    """PyTorch in float32 and the truth for the same rounded tensors."""
    singles = [tensor.float() for tensor in tensors]
    doubles = [one.double() for one in singles]
    own, exact = (
        _call(*one, weights is not None) for one in ((_by_pytorch, chain, singles), (_in_double, chain, doubles))
    )
    return own.quantities(weights), exact.quantities(weights)


def _candidate(ask: Callable[[], _T]) -> _T:
    try:
        return ask()
    except torch.OutOfMemoryError:  # not the implementation's fault
        raise
    except Exception as error:
        raise CandidateError(f"the implementation raised {first_line(error)}") from error


def _in_double(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    return evaluate(chain, tensors, dtype=torch.float64, moves=True)


def _by_pytorch(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    return evaluate(chain, tensors, moves=True)


def _nonfinite_findings(asked: _Asked, tensors: Sequence[Tensor], tells_infinities: bool) -> list[str]:
    run, chain, mode = asked.run, asked.chain, asked.mode
    findings = []
    for what, value in NONFINITE:
        x = tensors[0].clone()
        # In the middle of the last sample, so that a tile that stops early or a wrong sample shows.
        place = (-1, *(size // 2 for size in x.shape[1:]))
        x[place] = value
        changed = (x, *tensors[1:])
        result = _candidate(lambda: _call(run, chain, changed, False).output)  # noqa: B023  called at once
        with torch.no_grad(), pytorch_switches(mode, x.device), in_double(x.device):
            own = evaluate(chain, changed)
            problem = contract_problem("output", result, own)
            if not problem and differs_in_kind(result, own, tells_infinities):  # otherwise the truth decides nothing
                truth = evaluate(chain, changed, dtype=torch.float64)
                problem = nonfinite_problem(result, own, truth, what, tells_infinities)
        findings += [problem] if problem else []
    return findings


def _product_dtype(chain: Chain, tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype in which the convolution multiplies: autocast's, if there is one."""
    if chain.producer is not None and chain.producer.dtype is not None:
        dtype: torch.dtype = getattr(torch, chain.producer.dtype)
        return dtype
    return tensors[0].dtype
