"""Kinks: points where a derivative jumps, so that a rounding error decides whether an element has a gradient.

If a relu's argument is 1e-8 in float64, an honest kernel's sum may be −1e-8; the derivatives are then 1 and 0, and the
gradients differ by a whole term. `Kinks` records the arguments of such operators. Elements that an honest kernel may
place on either side (`ambiguous`) are kept out of the comparison: cotangents are chosen so that no gradient reaches
them (`spared`). Everything else is compared as strictly as without a kink. Where no choice of cotangents does that, for
example before a mean, the truth is computed with these elements on either side, and the difference is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from postlude.check.budget import ULPS, WORST_FACTOR
from postlude.check.max_pools import MAX_POOLS, Holding, ahead_of_the_second
from postlude.check.operator_bounds import Given, bounds_of

# At most this share of a value is spared; otherwise little would be left to compare.
MOST = 0.125
LIKELY = 4.0  # times the usual error: beyond it, one in 10⁴ elements is on the other side
# With so many likely elements, dozens are on the other side in PyTorch's gradients too, so the budget includes them.
MANY = 400
ROUNDS = 4  # each reduces what is left to at most the ambiguous share of a norm's group
LARGEST_WEIGHT = 8.0
RESIDUE = 16  # eps of the cotangents' dtype, relative to the gradient: what the cotangents' rounding leaves
SEED = 7


@dataclass(frozen=True)
class Meeting:
    """One call of an operator with kinks."""

    value: Tensor  # what is compared with the bounds, without its graph
    bounds: tuple[float, ...]
    result: Tensor  # with its graph
    moves: bool  # whether adding to the first argument changes `value` by the same amount
    windows: Holding | None = None  # of a max_pool

    def nearest(self, value: Tensor) -> Tensor:
        """The bound nearest to each element."""
        bounds = torch.tensor(self.bounds, dtype=torch.float64, device=value.device)
        return bounds[(value.double()[..., None] - bounds).abs().argmin(-1)] if len(self.bounds) > 1 else bounds

    def gap(self, value: Tensor) -> Tensor:
        return (value.double() - self.nearest(value)).abs()


@dataclass(frozen=True)
class Shift:
    """What is added to the first argument of each call, to put ambiguous elements on one side."""

    amounts: tuple[Tensor | None, ...]


class Kinks(TorchFunctionMode):
    """Records every call of an operator with kinks; with a shift, adds it to the operator's argument."""

    def __init__(self, shift: Shift | None = None) -> None:
        super().__init__()
        self.meetings: list[Meeting] = []
        self._shift = shift
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = str(getattr(func, "__name__", "")).split(".")[0]
        in_place = name.endswith("_") or bool(given.get("inplace", False))
        found = _met(name.rstrip("_").removeprefix("_"), args, given, in_place)
        if found is None:
            return func(*args, **given)
        amount = self._shift.amounts[self._calls] if self._shift and self._calls < len(self._shift.amounts) else None
        self._calls += 1
        if amount is not None:
            # In place if the call is in place, because its caller continues with the same tensor.
            moved = args[0].add_(amount) if name.endswith("_") else args[0] + amount
            args = (moved, *args[1:])
        result = func(*args, **given)
        value, bounds, moves = found
        tensor = result[0] if isinstance(result, tuple) else result
        windows = Holding(func, args[1:], given, args[0].shape) if name in MAX_POOLS else None
        self.meetings.append(Meeting(value, bounds, tensor, moves, windows))
        return result


@dataclass(frozen=True)
class Near:
    """The elements of one call that an honest kernel may place on either side of a bound."""

    possible: Tensor  # by the worst error that the rule allows
    likely: Tensor  # by the usual one


def ambiguous(exact: Meeting, others: Sequence[Meeting]) -> Near:
    """The ambiguous elements of a call.

    `others` are PyTorch and the rounded float64 at the same call: by the error rule they bound a kernel's error.
    """
    value = exact.value.double()
    gap = exact.gap(value)
    finite = torch.isfinite(value)
    known = torch.where(finite, value, 0.0)
    errors = torch.stack([torch.where(finite, o.value.double() - value, 0.0).nan_to_num(0.0, 0.0, 0.0) for o in others])
    eps = ULPS * torch.finfo(others[0].value.dtype).eps
    beyond = max(map(abs, exact.bounds))
    worst = WORST_FACTOR * (errors.abs().max() + eps * known.abs().max().clamp(min=beyond))
    usual = LIKELY * _rms(errors, 1).max() + eps * _rms(known, 0).clamp(min=beyond)
    # Exactly at a bound on every side: an earlier operator wrote the bound, so no rounding is involved.
    is_tie = torch.stack([o.gap(o.value) == 0 for o in others]).all(0) & (gap == 0)
    gap = torch.where(is_tie | ~finite, torch.inf, gap)
    most = int(MOST * gap.numel())
    if int((gap <= worst).sum()) > most:
        worst = torch.minimum(worst, gap.flatten().sort().values[max(0, most - 1)])
    return Near(gap <= worst, gap <= torch.minimum(usual, worst))


def _rms(values: Tensor, kept: int) -> Tensor:
    return values.flatten(kept).square().mean(-1).sqrt()


def all_ambiguous(exact: Sequence[Meeting], *others: Sequence[Meeting]) -> list[Near] | None:
    """The same for each call; None if there is none, or if the sides did not make the same calls."""
    seen = [[(meeting.value.shape, meeting.bounds) for meeting in side] for side in (exact, *others)]
    if not exact or any(one != seen[0] for one in seen):
        return None
    found: list[Near] = []
    for one, *across in zip(exact, *others, strict=True):
        near = ambiguous(one, across)
        found.append(near if one.windows is None else _with_ties(one, near, found))
    return found if bool(torch.stack([near.possible.any() for near in found]).any()) else None


def _with_ties(pool: Meeting, near: Near, before: Sequence[Near]) -> Near:
    """Adds ties of a max_pool: if a whole window is at a bound of an earlier operator (relu's zeros), an element that a
    kernel places on the other side of that bound wins the window."""
    assert pool.windows is not None
    is_tie = pool.gap(pool.value) == 0
    possible, likely = near.possible, near.likely
    for one in before:
        if one.possible.shape == pool.windows.shape:
            possible = possible | (pool.windows(one.possible) & is_tie)
            likely = likely | (pool.windows(one.likely) & is_tie)
    return Near(possible, likely)


def spared(
    output: Tensor, meetings: Sequence[Meeting], near: Sequence[Near], weights: Tensor
) -> tuple[Tensor, list[Tensor] | None]:
    """Cotangents with which no gradient reaches the ambiguous elements, and the likely ones that it still reaches.

    Only elementwise steps and norms lie between a kink and the output, so an element's gradient depends mostly on its
    own cotangent and a little on the norm's sums: correcting each cotangent by its own slope converges.
    """
    places = [place for place, one in enumerate(meetings) if one.result.requires_grad]
    results = [meetings[place].result for place in places]
    masks = [near[place].possible for place in places]
    if not results:
        return weights, None

    def gradients(of: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(output, results, of, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(one) if g is None else g for g, one in zip(found, results, strict=True)]

    dtype, exact = weights.dtype, weights.double()
    reachable = [mask for mask in masks if mask.shape == output.shape]
    if reachable:
        slopes = _slopes(gradients, masks, exact)
        for _ in range(ROUNDS):
            exact = _corrected(exact, gradients(exact), slopes, masks)
    weights = exact.to(dtype)
    least = RESIDUE * torch.finfo(dtype).eps
    found = gradients(weights.double())
    left: list[Tensor] = [torch.zeros_like(one.likely) for one in near]
    for place, gradient in zip(places, found, strict=True):
        left[place] = near[place].likely & (gradient.abs() > least * _rms(gradient, 0))
    return weights, few(left)


def few(left: Sequence[Tensor]) -> list[Tensor] | None:
    """`left` without calls that have so many elements that the budget includes them; None if nothing is left."""
    counts = torch.stack([one.sum() for one in left]).tolist()
    if not any(0 < count <= MANY for count in counts):
        return None
    return [one if count <= MANY else torch.zeros_like(one) for one, count in zip(left, counts, strict=True)]


def either_side(meetings: Sequence[Meeting], left: Sequence[Tensor]) -> list[Shift]:
    """The shifts that put all elements of `left` above their bounds, and below."""
    shifts = []
    for sign in (1.0, -1.0):
        amounts: list[Tensor | None] = []
        for one, mask in zip(meetings, left, strict=True):
            away = one.nearest(one.value) - one.value.double()  # from the element to its bound
            tiny = away.abs().clamp(min=torch.finfo(torch.float64).eps)
            crosses = mask & ((away * sign > 0) | (away == 0)) if one.moves else None
            amounts.append(None if crosses is None else torch.where(crosses, away + sign * tiny, 0.0))
        shifts.append(Shift(tuple(amounts)))
    return shifts


def _slopes(gradients: Callable[[Tensor], list[Tensor]], masks: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """How much of its own cotangent reaches each ambiguous element; random signs keep the share of others small."""
    generator = torch.Generator(like.device).manual_seed(SEED)
    signs = torch.randint(0, 2, like.shape, generator=generator, device=like.device).double() * 2 - 1
    found = []
    for place, mask in enumerate(masks):
        if mask.shape == like.shape:
            found.append(gradients(signs * mask)[place] * signs)
        else:
            found.append(torch.zeros_like(like))
    return found


def _corrected(weights: Tensor, found: list[Tensor], slopes: list[Tensor], masks: Sequence[Tensor]) -> Tensor:
    taken = torch.zeros_like(weights, dtype=torch.bool)
    for gradient, slope, mask in reversed(list(zip(found, slopes, masks, strict=True))):
        if mask.shape == weights.shape:
            mine = mask & ~taken & (slope != 0)
            moved = weights - torch.where(mine, gradient / torch.where(slope == 0, 1.0, slope), 0.0)
            weights = torch.where(mine, moved.clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT), weights)
            taken = taken | mine
    return weights


Met = tuple[Tensor, tuple[float, ...], bool]


def _met(name: str, args: tuple[Any, ...], given: Mapping[str, Any], in_place: bool) -> Met | None:
    """The value that an operator compares and its bounds, or None if it has no kinks."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
        return None
    if name in _PAIRS and len(args) > 1 and isinstance(args[1], Tensor):
        return (x - args[1]).detach(), (0.0,), args[1].shape == x.shape or args[1].numel() == 1
    if name in _EXTREMES:
        return _runner_up(name, x, args[1] if len(args) > 1 else given.get("dim"), given)
    if name in MAX_POOLS:
        gap = ahead_of_the_second(name, args, given)
        return None if gap is None else (gap, (0.0,), False)
    bounds = () if _is_smooth(name, Given(args, given)) else bounds_of(name, Given(args, given))
    return (x.detach().clone() if in_place else x.detach(), bounds, True) if bounds else None


def _is_smooth(name: str, given: Given) -> bool:
    """Whether the derivative does not jump at the operator's bounds."""
    return name == "softplus" or (name == "elu" and given(1, "alpha", 1.0) * given(3, "input_scale", 1.0) == 1)


def _runner_up(name: str, x: Tensor, dim: Any, given: Mapping[str, Any]) -> Met | None:
    """The lead of the largest over the second: by rounding another element may win."""
    axes = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    if len(axes) != 1 or not isinstance(axes[0], int) or x.shape[axes[0]] < 2:
        return None
    best = x.detach().topk(2, dim=axes[0], largest=name in ("amax", "max")).values
    gap = best.select(axes[0], 0) - best.select(axes[0], 1)
    return (gap.unsqueeze(axes[0]) if given.get("keepdim") else gap), (0.0,), False


_PAIRS = ("maximum", "minimum", "max", "min", "clamp_min", "clamp_max")
_EXTREMES = ("amax", "amin", "max", "min")
