"""The points of an examination, the most telling first: what is drawn at each, at which shape, in which mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from postlude.check.compare import LARGE_OFFSET
from postlude.check.draws import Family
from postlude.check.exam.shapes import (
    CHANNELS_LAST,
    DECLARED,
    FEWER,
    GAPS,
    LARGER,
    LONGER,
    MORE,
    NUMBERS,
    ODD,
    ONE,
    SMALLEST,
    WORKING,
)
from postlude.check.nested import map_tensors
from postlude.check.points import (
    input_family,
    inputs_like,
    laid_out_like,
    producer_biases,
    random_state,
)
from postlude.check.sides import Wants

GIVEN = "given"
NAN, INFINITY, MASKED = "NaN", "infinity", "-infinity"
NONFINITE = {NAN: float("nan"), INFINITY: float("inf"), MASKED: float("-inf")}
# A variance computed as E[x²] − E[x]² loses accuracy with the square of this, honest rounding only linearly.
OFFSET = 2000.0
REQUIRED = 6  # points that are always asked, however long they take
MOST_REPLACED = 3
MOST_SPOILED = 4  # inputs that get a NaN in turn
STEP = 100_003  # between the seeds of a point and of those that replace it


@dataclass(frozen=True)
class Case:
    """One point before anything is drawn."""

    name: str
    family: Family | str = "hierarchical"
    shape: str = WORKING
    seed: int = 0
    state_seed: int = 0
    flipped: bool = False  # eval where the reference trains, and the reverse
    repeated: bool = False  # asked twice
    nulls: bool = False  # answers for other inputs and parameters must be rejected here
    required: bool = False
    stretch: float = 1.0  # of the inputs
    state_stretch: float = 1.0  # of every parameter that is no producer's weight
    state_shift: float = 0.0  # of producers' biases
    attempt: int = 0
    wants: Wants | None = None  # None: all gradients if gradients are judged, else none
    unaligned: bool = False
    spoiled: int = 0  # the floating input that gets a NaN or an infinity

    def again(self) -> Case:
        """The same point with other numbers, if these could not tell; then with small ones, which saturate less."""
        moved = replace(self, seed=self.seed + STEP, state_seed=self.state_seed + STEP, attempt=self.attempt + 1)
        return replace(moved, family="small") if self.attempt and self.family == "hierarchical" else moved

    @property
    def is_nonfinite(self) -> bool:
        return self.family in NONFINITE


def cases_for(shapes: Sequence[str], seeds: int, base: int, backward: bool = False, floating: int = 1) -> list[Case]:
    """The points. Seeds count from `base`; those of states and inputs differ except at the first three points.

    `floating` inputs hold floating numbers.
    """
    first, second, third = base, base + 1, base + 2
    modes: dict[str, Wants] = {"gradient mode on": "recorded"}
    if backward:
        modes = {"gradient mode off": "none", "frozen inputs": "parameters", "frozen parameters": "inputs"}
    found = [
        Case("second call", seed=first, state_seed=first, repeated=True, nulls=True),
        # A candidate that remembers answers by inputs, or by parameters, is caught here.
        Case("same inputs, new parameters", seed=first, state_seed=second, nulls=True),
        Case("new inputs, same parameters", seed=third, state_seed=second, nulls=True),
        Case("the file's own inputs", GIVEN),
        Case("other mode", flipped=True),
        Case("normal", "normal"),
        Case("declared shape", shape=DECLARED),
        *(Case(name, shape=name) for name in (ONE, ODD, SMALLEST, CHANNELS_LAST, GAPS, LARGER, LONGER, NUMBERS)),
        *(Case(name, shape=name) for name in (FEWER, MORE)),
        *(Case(name, wants=wants) for name, wants in modes.items()),
        Case("unaligned inputs", unaligned=True),
        Case("small values", "small"),
        Case("sparse", "sparse"),
        Case(NAN, NAN),
        Case(INFINITY, INFINITY),
        Case(MASKED, MASKED),
        *(Case(f"{NAN} (input {place + 1})", NAN, spoiled=place) for place in range(1, min(floating, MOST_SPOILED))),
        *(Case(LARGE_OFFSET, LARGE_OFFSET) for _ in range(seeds)),
        Case("uniform", "uniform"),
        Case("heavy-tailed", "heavy-tailed"),
        *(Case("random") for _ in range(max(0, seeds - 3))),
    ]
    kept = [case for case in found if case.shape in (WORKING, *shapes)]
    numbered = [
        case if place < 3 else replace(case, seed=base + 3 + place, state_seed=base + 3 + place)
        for place, case in enumerate(kept)
    ]
    return [replace(case, required=place < REQUIRED) for place, case in enumerate(numbered)]


def inputs_of(
    case: Case,
    template: list[Any],
    bounds: tuple[float, float] | None,
    has_bias: bool = True,
    shuffles_integers: bool = False,
) -> list[Any]:
    """The inputs of a point. `bounds` limits random numbers to a range, for references that accept no others.

    At some points a large offset is in a bias instead, if the model `has_bias`.
    """
    if case.family == GIVEN:
        return template
    if case.is_nonfinite:
        return _with_nonfinite(template, case, bounds)
    family = input_family(_family(case), case.seed, has_bias)
    values = inputs_like(template, family, case.seed, OFFSET, shuffles_integers)
    if family == LARGE_OFFSET and case.seed // 2 % 2:  # exponentials overflow on one side only
        values = map_tensors(lambda t: _moved(t, torch.neg), values)
    if bounds is not None:
        low, high = bounds
        return list(map_tensors(lambda t: _moved(t, lambda v: low + (high - low) * torch.sigmoid(v)), values))
    if case.stretch == 1.0:
        return list(values)
    return list(map_tensors(lambda t: _moved(t, lambda v: v * case.stretch), values))


def state_of(case: Case, reference: nn.Module) -> dict[str, Tensor]:
    state = random_state(reference, case.state_seed, _family(case), OFFSET)
    if case.state_shift:
        shifted = producer_biases(reference)
        return {key: value + case.state_shift if key in shifted else value for key, value in state.items()}
    if case.state_stretch == 1.0:
        return state
    # Producers' weights are matrices and kernels; a norm's γ and β, and scales of a model's own, are vectors.
    return {
        key: value * case.state_stretch if value.is_floating_point() and value.dim() < 2 else value
        for key, value in state.items()
    }


def _family(case: Case) -> Family:
    return "hierarchical" if case.family in (GIVEN, *NONFINITE) else case.family  # type: ignore[return-value]


def _moved(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return laid_out_like(function(tensor.detach().double()).to(tensor.dtype), tensor)


def can_be_spoiled(tensor: Tensor) -> bool:
    """Whether a NaN or an infinity can be put into one of its samples."""
    return tensor.is_floating_point() and tensor.dim() > 0 and tensor.numel() > 0


def _with_nonfinite(template: list[Any], case: Case, bounds: tuple[float, float] | None) -> list[Any]:
    values = inputs_of(replace(case, family="hierarchical"), template, bounds)
    places = itertools.count()

    def spoil(tensor: Tensor) -> Tensor:
        if not can_be_spoiled(tensor) or next(places) != case.spoiled:
            return tensor
        if case.family == MASKED:  # the first half of the last sample, as a mask of logits has it
            rows = tensor.data[-1] if tensor.dim() > 1 else tensor.data
            rows[: rows.shape[0] // 2] = NONFINITE[MASKED]
            return tensor
        # In the middle of the last sample, so that a tile that stops early or a wrong sample shows.
        place = (-1, *(size // 2 for size in tensor.shape[1:]))
        tensor.data[place] = NONFINITE[str(case.family)]
        return tensor

    return list(map_tensors(spoil, values))
