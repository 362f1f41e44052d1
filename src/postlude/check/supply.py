"""Inputs for windows of timed calls: values that no earlier call has seen, and other ones in every call of a window.

A candidate that remembers answers, by content or by address, therefore finds none to reuse.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postlude.check.isolation.turns import PLACES, pool_length, settle_heap, view_at
from postlude.check.isolation.wire import flat_values
from postlude.check.nested import map_tensors, tensors_in

FEW = 1 << 12  # elements; fewer have too few rotations, so each is drawn by itself


@dataclass(frozen=True)
class Turns:
    """The inputs of one window. They are valid until the next window's are drawn."""

    template: tuple[Any, ...]
    pools: Sequence[Tensor]  # one for each tensor that changes, in order
    places: Sequence[int]  # one for each call

    def __len__(self) -> int:
        return len(self.places)

    def inputs(self, call: int) -> tuple[Any, ...]:
        place = self.places[call]
        return self._with_pools(lambda pool, x: view_at(pool, x.shape, x.stride(), place))

    def whole(self) -> tuple[tuple[Any, ...], list[Any]]:
        """The inputs with a pool in place of every tensor that changes, and for each tensor the shape and the strides
        of the views of its pool; None for one that stays."""
        forms = [[list(x.shape), list(x.stride())] if changes(x) else None for x in tensors_in(list(self.template))]
        return self._with_pools(lambda pool, _: pool), forms

    def _with_pools(self, made: Callable[[Tensor, Tensor], Tensor]) -> tuple[Any, ...]:
        pools = iter(self.pools)
        return tuple(map_tensors(lambda x: made(next(pools), x) if changes(x) else x, self.template))


class Supply:
    """Draws the inputs of windows from the values of `sets`, which have the same shapes and strides."""

    def __init__(self, sets: Sequence[Sequence[Any]]) -> None:
        if not sets:
            raise ValueError("nothing to draw from")
        self.template = tuple(sets[0])
        # A set that is laid out otherwise than the first has no place in its pool.
        alike = [one for one in sets if _form(one) == _form(sets[0])]
        columns = zip(*map(_changing, alike), strict=True)
        self._values = [[flat_values(tensor) for tensor in column] for column in columns]
        self._pools: list[Tensor] = []
        self._random = random.SystemRandom()  # a candidate must not be able to predict its inputs

    @property
    def repeats(self) -> bool:
        """Whether all calls have the same inputs. Integers, which may be indices or offsets, stay as they are."""
        return not self._values

    def draw(self, calls: int) -> Turns:
        if not self._pools:
            self._pools = [_pool_for(values[0]) for values in self._values]
        for pool, values in zip(self._pools, self._values, strict=True):
            self._fill(pool, values)
        settle_heap()
        places: list[int] = []
        while len(places) < calls:
            places += self._random.sample(range(PLACES), min(PLACES, calls - len(places)))
        return Turns(self.template, self._pools, places)

    def _fill(self, pool: Tensor, values: list[Tensor]) -> None:
        """Fills the pool with the values of random sets, each rotated by a random distance."""
        extent = values[0].numel()
        if extent < FEW:
            known = torch.cat(values)
            generator = torch.Generator(pool.device).manual_seed(self._random.getrandbits(60))
            pool.copy_(known[torch.randint(len(known), pool.shape, generator=generator, device=pool.device)])
            return
        order: list[Tensor] = []
        for start in range(0, pool.numel(), extent):
            order = order or self._random.sample(values, len(values))
            part, known, moved = pool[start : start + extent], order.pop(), self._random.randrange(extent)
            # In two pieces: `roll` would take memory for another input.
            head = part[:moved]
            head.copy_(known[extent - moved :][: head.numel()])
            part[moved:].copy_(known[: max(0, part.numel() - moved)])


def changes(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0


def _changing(inputs: Sequence[Any]) -> list[Tensor]:
    return [x for x in tensors_in(list(inputs)) if changes(x)]


def _form(inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [(x.shape, x.stride(), x.dtype) for x in _changing(inputs)]


def _pool_for(values: Tensor) -> Tensor:
    return values.new_empty(pool_length(values.numel(), values.element_size()))
