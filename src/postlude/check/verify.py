"""Judges an implementation of a chain: its results against float64, PyTorch's own, and null candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from postlude.chain import Chain
from postlude.check.budget import MIN_POINTS, is_constant
from postlude.check.chain_sides import (
    Asked,
    Backward,
    Copies,
    Run,
    Sides,
    by_pytorch,
    evaluated,
    in_single,
    product_dtype,
)
from postlude.check.compare import (
    GRADIENT,
    LARGE_OFFSET,
    Answers,
    AtPoint,
    compare,
    contract_problem,
    differs_in_kind,
    larger,
    nonfinite_problem,
    poison,
    same_bits,
    verdict_of,
)
from postlude.check.modes import FORMATS, in_double, pytorch_switches, resolve
from postlude.check.points import ChainPoint
from postlude.check.sides import CandidateError
from postlude.check.verdict import Verdict
from postlude.errors import first_line
from postlude.reference import evaluate

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
    dtype, device = product_dtype(chain, given[0].tensors), given[0].tensors[0].device
    mode = resolve(precision, dtype, device, chain.is_linear)
    findings: list[str] = []
    asked = Asked(run, chain, mode, backward, tells_infinities if nonfinite else None)
    try:
        measured = _measured(asked, given, findings)
        verdict = verdict_of(measured, findings, mode, least=least)
        if verdict.right or findings or (FORMATS[mode] is None and among is None):
            return verdict
        again = _measured(replace(asked, among=among or by_pytorch), given, findings)
    except CandidateError as error:
        return Verdict("wrong", (str(error),), mode)
    return verdict_of(list(map(_worse, measured, again)), findings, mode, least=least)


def _worse(first: AtPoint, second: AtPoint) -> AtPoint:
    """The second measurement of a point, but with outputs no better than in the first, so that a race that shows only
    sometimes counts.

    Gradients are those of the second, whose cotangents spare more elements.
    """
    found = dict(second.quantities)
    for name, measured in second.quantities.items():
        if not name.startswith(GRADIENT):
            found[name] = replace(measured, result=larger(first.quantities[name].result, measured.result))
    return AtPoint(second.name, found)


def _measured(asked: Asked, points: Sequence[ChainPoint], findings: list[str]) -> list[AtPoint]:
    """What is measured at each point, up to the first finding."""
    measured: list[AtPoint] = []
    copies = Copies(asked.chain)
    for seed, point in enumerate(points):
        with_nulls = point.family != LARGE_OFFSET and sum(map(_can_tell, measured)) < NULL_POINTS
        answers = _answers(asked, point.tensors, copies, seed, findings, with_nulls)
        measured.append(AtPoint(point.family, compare(answers, findings)))
        if seed == 0 and asked.tells_infinities is not None:
            findings += _nonfinite_findings(asked, point.tensors, asked.tells_infinities)
        if findings:
            break
    return measured


def _answers(
    asked: Asked, tensors: tuple[Tensor, ...], copies: Copies, seed: int, findings: list[str], with_nulls: bool
) -> Answers:
    """The candidate runs first: memory that it is given must not hold the right result."""
    run, chain, backward = asked.run, asked.chain, asked.backward
    before, doubles = copies(tensors)
    called = _candidate(lambda: evaluated(run, chain, tensors, backward))
    sides = Sides(asked, before, doubles)
    weights, left = sides.cotangents(seed) if backward else (None, None)
    result = _candidate(lambda: called.quantities(weights))
    if not all(same_bits(old, new) for old, new in zip(before, tensors, strict=True)):
        findings.append("the implementation changed its input tensors")
        tensors = tuple(before)
    repeated = None
    if seed == 0:
        poison(sides.own.output)
        repeated = _candidate(lambda: evaluated(run, chain, tensors, backward).quantities(weights))
    own, truth, rounded = sides.quantities(weights)
    flipped = sides.flipped(left, weights) if left is not None else ()
    nulls = sides.nulls(seed) if with_nulls else None
    single = in_single(chain, tensors, weights) if own["output"].dtype == torch.float64 else None
    return Answers(result, own, truth, rounded, repeated, nulls, single, guesses=with_nulls, flipped=flipped)


def _can_tell(one: AtPoint) -> bool:
    output = one.quantities.get("output")
    return one.name != LARGE_OFFSET and output is not None and not is_constant(output, output.scale.spread)


def _candidate(ask: Callable[[], _T]) -> _T:
    try:
        return ask()
    except torch.OutOfMemoryError:  # not the implementation's fault
        raise
    except Exception as error:
        raise CandidateError(f"the implementation raised {first_line(error)}") from error


def _nonfinite_findings(asked: Asked, tensors: Sequence[Tensor], tells_infinities: bool) -> list[str]:
    run, chain, mode = asked.run, asked.chain, asked.mode
    findings = []
    for what, value in NONFINITE:
        x = tensors[0].clone()
        # In the middle of the last sample, so that a tile that stops early or a wrong sample shows.
        place = (-1, *(size // 2 for size in x.shape[1:]))
        x[place] = value
        changed = (x, *tensors[1:])
        result = _candidate(lambda: evaluated(run, chain, changed, False).output)  # noqa: B023  called at once
        with torch.no_grad(), pytorch_switches(mode, x.device), in_double(x.device):
            own = evaluate(chain, changed)
            problem = contract_problem("output", result, own)
            if not problem and differs_in_kind(result, own, tells_infinities):  # otherwise the truth decides nothing
                truth = evaluate(chain, changed, dtype=torch.float64)
                problem = nonfinite_problem(result, own, truth, what, tells_infinities)
        findings += [problem] if problem else []
    return findings
