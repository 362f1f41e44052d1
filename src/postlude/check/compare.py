"""What verifying a chain and verifying a module have in common: named quantities, compared point by point."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from postlude.check.budget import MIN_POINTS, Measured, budget_of, judge, spreads_of
from postlude.check.deviations import Deviation, deviation, deviations, scale_of
from postlude.check.draws import LARGEST_OFFSET, draw, generator_for
from postlude.check.nulls import null_candidates
from postlude.check.verdict import NONE, Errors, Judged, Verdict, conclude

Quantities = dict[str, Tensor]
Progress = Callable[[str], None] | None
OUTPUT, GRADIENT = "output", "gradient of "  # how the names of quantities begin
LARGE_OFFSET = "large offset"
# Gradients below this part of the largest one are judged by absolute error: the norm may cancel them.
FLOOR_FRACTION = 1e-3
# At a large offset the error is mostly the rounding of a few means: too few numbers for two honest results to agree
# within 2×. These points are to find cancellation, which exceeds this slack by orders of magnitude.
OFFSET_SLACK = 4.0
FAINT = 10.0  # times the usual budget
# PyTorch sums float32 in float64, but float64 in nothing wider: there the error of its instance_norm, which is the
# truth, is 15 to 36 times its scaled error in float32 (24³ and 48³ positions).
NOTHING_WIDER = 32.0
EXACT = Deviation(NONE, 0.0)


@dataclass(frozen=True)
class Answers:
    """Every quantity at one point: by the candidate, by PyTorch, in float64, and in float64 with rounded operands."""

    result: Quantities
    own: Quantities
    truth: Quantities
    rounded: Quantities | None = None
    repeated: Quantities | None = None  # the candidate's second answer to the same question
    nulls: Mapping[str, Quantities] | None = None  # further answers that must be rejected, for outputs
    single: tuple[Quantities, Quantities] | None = None  # for float64 data: PyTorch in float32, and its truth
    # Everything but the result, as measured for another candidate at the same point.
    before: Mapping[str, Measured] | None = None
    guesses: bool = True  # whether to try null candidates that are guessed from the truth's statistics as well
    flipped: tuple[Quantities, ...] = ()  # the truth with ambiguous elements on either side of their kinks


@dataclass(frozen=True)
class AtPoint:
    """What was measured at one test point."""

    name: str  # of the point, or of its family; a large offset is judged apart
    quantities: dict[str, Measured]


def compare(answers: Answers, findings: list[str]) -> dict[str, Measured]:
    """Measures each quantity. What cannot be measured (shape, dtype, no gradient) becomes a finding."""
    measured = {}
    for name, truth in answers.truth.items():
        problem = contract_problem(name, answers.result.get(name), answers.own[name])
        if problem:
            findings.append(problem)
        elif not has_error(answers.own[name]):
            if not same_bits(answers.result[name], answers.own[name]):
                findings.append(f"{name}: differs from PyTorch's")
        else:
            measured[name] = _measured(name, answers, in_real(truth))
    unexpected = answers.result.keys() - answers.truth.keys()
    findings += [f"{name}: PyTorch has none" for name in sorted(unexpected) if answers.result[name].any()]
    return measured


def is_output(name: str) -> bool:
    """Whether a quantity is a result, and not a gradient or a buffer."""
    return name.startswith(OUTPUT)


def has_error(tensor: Tensor) -> bool:
    """Whether its values may differ from the truth by rounding; integers, such as indices and masks, may not."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_real(tensor: Tensor) -> Tensor:
    """The tensor, or the real and imaginary parts of a complex one along one more axis: both are judged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def contract_problem(name: str, result: Tensor | None, own: Tensor) -> str | None:
    """Why a result cannot replace PyTorch's, whatever its values are."""
    if result is None:
        return f"{name}: missing"
    for what, ours, theirs in (
        ("shape", tuple(result.shape), tuple(own.shape)),
        ("dtype", result.dtype, own.dtype),
        ("device", result.device.type, own.device.type),
    ):
        if ours != theirs:
            return f"{name}: {what} {ours}, PyTorch gives {theirs}"
    return None


def verdict_of(
    points: Sequence[AtPoint],
    findings: Sequence[str],
    precision: str,
    faint: bool = False,
    least: int = MIN_POINTS,
    offset: float = LARGEST_OFFSET,
) -> Verdict:
    """The verdict. Plain points decide; points with a large offset are judged separately and can only find faults.

    PyTorch's own error is far larger at a large offset, so in one pool it would hide errors at the plain points. The
    same holds for plain points whose truth varies little; with `faint` these are judged separately as well. With fewer
    points than `least` the verdict is "cannot tell". A large offset is `offset` spreads, or what the dtype allows.
    """
    points = [_with_floors(one) for one in points]
    plain = [one for one in points if one.name != LARGE_OFFSET]
    shifted = [one for one in points if one.name == LARGE_OFFSET]
    extra = _judge_all(shifted, False, f" ({LARGE_OFFSET})", OFFSET_SLACK, least, offset)
    if faint:
        plain, weak = _without_faint(plain)
        extra += _judge_all(weak, False, " (faint)", OFFSET_SLACK, least=1)
    if not plain:
        return conclude(precision, findings, extra)
    return conclude(precision, findings, _judge_all(plain, strict=precision == "fp32", least=least), extra)


def _without_faint(points: Sequence[AtPoint]) -> tuple[list[AtPoint], list[AtPoint]]:
    """Separates, for each quantity, the points whose own budget is far above that of most."""
    faint: set[tuple[int, str]] = set()
    for name in dict.fromkeys(name for one in points for name in one.quantities):
        places = [place for place, one in enumerate(points) if name in one.quantities]
        own = [points[place].quantities[name] for place in places]
        budgets = [budget_of([m], [s]).rms if s > 0 else math.inf for m, s in zip(own, spreads_of(own))]
        limit = FAINT * sorted(budgets)[len(budgets) // 2]
        # Enough points must remain.
        weakest = sorted(zip(budgets, places), reverse=True)[: max(0, len(places) - MIN_POINTS)]
        faint |= {(place, name) for budget, place in weakest if budget > limit}

    def part(wanted: bool) -> list[AtPoint]:
        kept = [
            AtPoint(one.name, {n: m for n, m in one.quantities.items() if ((place, n) in faint) == wanted})
            for place, one in enumerate(points)
        ]
        return [one for one in kept if one.quantities]

    return part(False), part(True)


def differs_in_kind(result: Tensor, own: Tensor, tells_infinities: bool = True) -> bool:
    """Whether finite values, NaN or infinities are at other places than PyTorch's."""
    kinds = [_kind(tensor.to(own.device), tells_infinities) for tensor in (result, own)]
    return not torch.equal(*kinds)


def nonfinite_problem(
    result: Tensor, own: Tensor, truth: Tensor, what: str, tells_infinities: bool = True
) -> str | None:
    """A problem if PyTorch and the truth agree on what is finite, NaN or infinite, and the result does not."""
    kinds = [_kind(tensor.to(truth.device), tells_infinities) for tensor in (result, own, truth)]
    wrong = (kinds[0] != kinds[2]) & (kinds[1] == kinds[2])
    if not bool(wrong.any()):
        return None
    lost = bool((wrong & (kinds[2] != 0)).any())
    verb = "lost" if lost else "spread"
    return f"with {what} in the input the result {verb} it: {int(wrong.sum())} values differ"


def cotangent(like: Tensor, seed: int, narrowest: torch.dtype | None = None) -> Tensor:
    """A random weight for each output, with which gradients are taken; drawn on the output's device.

    If a gradient on the way is float16 (`narrowest`, else the output's dtype), weights are small when many are summed,
    as with a scaled loss: sums above 65504 are infinite.
    """
    dtype = like.dtype if like.is_floating_point() else torch.float32
    weights = draw(like.shape, "normal", generator_for(seed + 20_000, like.device), dtype).to(like.device)
    if torch.float16 not in (dtype, narrowest):
        return weights
    return weights * 2.0 ** -round(math.log2(max(1, math.prod(like.shape[2:]))) / 2)


def poison(like: Tensor) -> None:
    """Leaves NaN in memory that the next allocation of this size is likely to reuse."""
    scratch = [torch.full_like(like, math.nan) for _ in range(3) if like.is_floating_point()]
    del scratch


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results are equal, where NaN equals NaN."""
    return a.shape == b.shape and bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())


def _measured(name: str, answers: Answers, truth: Tensor) -> Measured:
    compared = {key: in_real(one) for key, one in _compared(name, answers, truth).items()}
    found = dict(zip(compared, deviations(list(compared.values()), truth), strict=True))
    result = found[_RESULT]
    if answers.repeated is not None and name in answers.repeated:
        # A second answer of another shape is as wrong as one with other values.
        result = larger(result, found.get(_REPEATED, _INFINITE))
    if answers.before is not None and name in answers.before:
        return replace(answers.before[name], result=result)
    sides = [one.errors for (what, _), one in found.items() if what == _SIDE]
    return Measured(
        scale=scale_of(truth, answers.own[name].dtype.to_real()),
        result=result,
        own=found[_OWN] if answers.single is None else _own_in_float64(name, *answers.single),
        rounded=found.get(_ROUNDED, EXACT),
        nulls={null: one.errors for (what, null), one in found.items() if what == _NULL},
        # How much gradients may differ because elements lie on either side of a kink.
        kinks=Errors(math.hypot(*(one.rms for one in sides), 0.0), sum(one.worst for one in sides)),
    )


Key = tuple[str, str]  # what is compared, and its name where there are several
_RESULT, _REPEATED, _OWN, _ROUNDED = (("result", ""), ("repeated", ""), ("own", ""), ("rounded", ""))
_NULL, _SIDE = "null", "side of a kink"


def _compared(name: str, answers: Answers, truth: Tensor) -> dict[Key, Tensor]:
    """Everything that is compared with one truth."""
    found = {_RESULT: answers.result[name]}
    again = (answers.repeated or {}).get(name)
    if again is not None and again.shape == answers.own[name].shape:
        found[_REPEATED] = again
    if answers.before is not None and name in answers.before:
        return found
    is_gradient = name.startswith(GRADIENT)
    if answers.single is None:
        found[_OWN] = answers.own[name]
    if answers.rounded is not None:
        found[_ROUNDED] = answers.rounded[name]
    if answers.guesses:
        # All channels may have the same gradient, so only zeros are tried as a null candidate.
        nulls = {"zeros": torch.zeros_like(truth)} if is_gradient else null_candidates(truth)
        found.update({(_NULL, null): values for null, values in nulls.items()})
    if is_output(name):
        further = (answers.nulls or {}).items()
        found.update({(_NULL, null): values[name] for null, values in further if name in values})
    if is_gradient:
        found.update({(_SIDE, str(place)): side[name] for place, side in enumerate(answers.flipped)})
    return found


def _own_in_float64(name: str, own: Quantities, exact: Quantities) -> Deviation:
    """In float64 PyTorch is the truth, so its error in float32 is used, scaled down."""
    errors = deviation(in_real(own[name]), in_real(exact[name])).errors
    factor = NOTHING_WIDER * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return Deviation(errors.times(factor), 0.0)


_INFINITE = Deviation(Errors(math.inf, math.inf), math.inf)


def larger(a: Deviation, b: Deviation) -> Deviation:
    errors = Errors(max(a.errors.rms, b.errors.rms), max(a.errors.worst, b.errors.worst))
    return Deviation(errors, max(a.nearness, b.nearness))


def _kind(tensor: Tensor, tells_infinities: bool) -> Tensor:
    """0 finite, 1 NaN, 2 infinite; 1 for both without `tells_infinities`."""
    infinite = 2 if tells_infinities else 1
    return tensor.isnan().to(torch.int8) + infinite * tensor.isinf().to(torch.int8)


def _with_floors(one: AtPoint) -> AtPoint:
    """Makes gradients relative to their size, but at least to a floor, because a norm may cancel them."""
    gradients = {name for name in one.quantities if name.startswith(GRADIENT)}
    largest = max((one.quantities[name].scale.rms for name in gradients), default=0.0)
    least = FLOOR_FRACTION * largest
    floors = {name: max(one.quantities[name].scale.rms, least) for name in gradients}
    return AtPoint(one.name, {name: replace(m, floor=floors.get(name, 0.0)) for name, m in one.quantities.items()})


def _judge_all(
    points: Sequence[AtPoint],
    strict: bool,
    suffix: str = "",
    slack: float = 1.0,
    least: int = MIN_POINTS,
    offset: float = 0.0,
) -> list[Judged]:
    names = dict.fromkeys(name for one in points for name in one.quantities)
    return [
        judge(
            name + suffix,
            [one.quantities[name] for one in points if name in one.quantities],
            strict=strict and is_output(name),
            slack=slack,
            least=least,
            offset=offset,
        )
        for name in names
    ]
