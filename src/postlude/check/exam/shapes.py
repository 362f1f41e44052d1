"""The shapes and layouts at which a candidate is asked, all cropped from the declared inputs.

Crops keep the file's own values, which may be needed (indices, masks). A shape that the reference does not accept is
left out, with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from postlude.check.nested import map_leaves, map_tensors, named_leaves, tensors_in
from postlude.check.sides import UnanswerableError

WORKING, DECLARED, ONE, ODD, SMALLEST = "working", "declared", "batch 1", "odd sizes", "smallest"
CHANNELS_LAST, GAPS = "channels-last", "non-contiguous"
LARGER, LONGER, NUMBERS = "larger batch", "longer rows", "other numbers"  # than declared
FEWER, MORE = "less along axis 1", "more along axis 1"  # features, classes, a sequence; weights may fix that size
WORKING_BATCH, WORKING_SPACE = 8, 16
LEAST_BATCH, LEAST_SPACE = 3, 5
# Multiplications of one call in float64 at the working shape: about 0.1 s on two cores.
WORKING_FLOPS = 2e9
WORKING_ELEMENTS = 1 << 21
SMALL_SIZES = (2, 3, 4, 5, 6, 8, 12)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

# The cost of one call of the reference in multiplications and elements; raises UnanswerableError.
Cost = Callable[[list[Any]], tuple[float, int]]


@dataclass(frozen=True)
class Shape:
    """Inputs with the file's own values. Points have the same sizes, strides and dtypes."""

    name: str
    inputs: list[Any]

    @property
    def is_contiguous(self) -> bool:
        return all(tensor.is_contiguous() for tensor in tensors_in(self.inputs))

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in tensors_in(self.inputs))

    def __str__(self) -> str:
        return " ".join("×".join(map(str, tensor.shape)) or "scalar" for tensor in tensors_in(self.inputs))


def shapes_of(inputs: Sequence[Any], cost: Cost) -> tuple[dict[str, Shape], list[str]]:
    """Every shape that the reference accepts, and what was left out."""
    given = list(inputs)
    working = _working(given, cost)
    found = {WORKING: Shape(WORKING, working), DECLARED: Shape(DECLARED, given)}
    refused: dict[str, str] = {}  # of a kind that is tried in several sizes, the last
    known = [[tuple(tensor.shape) for tensor in tensors_in(each)] for each in (working, given)]
    for name, make in _variants(given, working):
        if name in found:
            continue
        made = make()
        sizes = [tuple(tensor.shape) for tensor in tensors_in(made)]
        if name in (ONE, ODD, SMALLEST) and sizes in known:
            continue
        try:
            _check_size(name, made)
            flops, _ = cost(made)
            _check_size(name, made, flops)
        except UnanswerableError as error:
            refused[name] = f"{name} ({' '.join(map(str, sizes))}): {error}"
        else:
            found[name] = Shape(name, made)
    left_out = [text for name, text in refused.items() if name not in (SMALLEST, FEWER, MORE, *found)]
    if fixed := [number for number in _numbers_in(given) if not isinstance(number, float)]:
        left_out.append(f"other values of inputs that are not tensors ({', '.join(map(repr, fixed))})")
    return found, left_out


def _check_size(name: str, inputs: list[Any], flops: float = 0.0) -> None:
    """Raises if a size above the declared one is too large for float64."""
    if name in (LARGER, LONGER, MORE) and (_is_too_large(inputs) or flops > 8 * WORKING_FLOPS):
        raise UnanswerableError("float64 would take too long")


def _is_too_large(inputs: list[Any]) -> bool:
    return sum(tensor.numel() for tensor in tensors_in(inputs)) > 4 * WORKING_ELEMENTS


def _variants(given: list[Any], working: list[Any]) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """Kinds of shapes, each made only when it is needed. Several of one kind are tried in turn."""
    yield ONE, lambda: cut(working, batch=1)
    yield ODD, lambda: cut(given, batch=LEAST_BATCH, space=_odd(working))
    for size in SMALL_SIZES:
        if all(size < limit for limit in space_of(working).values()):
            yield SMALLEST, partial(cut, working, batch=2, space=dict.fromkeys(space_of(working), size))
    if any(tensor.dim() in _FORMATS for tensor in tensors_in(working)):
        yield CHANNELS_LAST, lambda: map_tensors(_channels_last, cut(working, batch=LEAST_BATCH))
    yield GAPS, lambda: map_tensors(_with_gaps, cut(working, batch=LEAST_BATCH))
    declared = space_of(given)
    for space in (dict.fromkeys(declared, LEAST_SPACE), space_of(working), declared):  # not every size is accepted
        yield LARGER, partial(_larger, given, space)
        if space:
            yield LONGER, partial(_longer, given, space)
    width = next((tensor.shape[1] for tensor in tensors_in(working) if tensor.dim() > 1), 0)
    if width > 2:
        yield FEWER, lambda: _resized(working, width, width - 1 - width % 2)
    if width:
        yield MORE, lambda: _resized(working, width, width + 2)
    if any(isinstance(number, float) for number in _numbers_in(given)):
        yield NUMBERS, lambda: _with_other_numbers(working)


def _larger(given: list[Any], space: dict[int, int]) -> list[Any]:
    made = cut(given, space=space)
    return made if _is_too_large(made) else _grown(made, 0, twice=True)


def _longer(given: list[Any], space: dict[int, int]) -> list[Any]:
    last = max(space)
    made = cut(given, batch=LEAST_BATCH, space={**space, last: space_of(given)[last]})
    return made if _is_too_large(made) else _grown(made, last)


def _working(given: list[Any], cost: Cost) -> list[Any]:
    """The largest of a few sizes that is cheap enough, by counted multiplications, not by time."""
    batch, space = LEAST_BATCH, LEAST_SPACE
    made = given
    sizes = [(WORKING_BATCH, WORKING_SPACE), (4, 16), (4, 12), (LEAST_BATCH, 9), (LEAST_BATCH, LEAST_SPACE)]
    for batch, space in sizes:
        cropped = cut(given, batch=batch, space=dict.fromkeys(space_of(given), space))
        if sum(t.numel() for t in tensors_in(cropped)) > WORKING_ELEMENTS and (batch, space) != sizes[-1]:
            continue
        try:
            flops, elements = cost(cropped)
        except UnanswerableError:
            # The reference may accept no other sizes: a norm over the last axis, a table of positions.
            cropped = cut(given, batch=batch)
            try:
                flops, elements = cost(cropped)
            except UnanswerableError:
                return given  # not even another batch
        made = cropped
        if flops <= WORKING_FLOPS and elements <= 4 * WORKING_ELEMENTS:
            break
    return made


def cut(inputs: list[Any], batch: int | None = None, space: dict[int, int] | None = None) -> list[Any]:
    """Crops every tensor with the first one's batch size to `batch` samples and `space[axis]` positions."""
    tensors = tensors_in(inputs)
    samples = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)

    def piece(tensor: Tensor) -> Tensor:
        sizes = list(tensor.shape)
        # A vector of numbers may belong to channels; one of integers has a label for each sample.
        has_samples = tensor.dim() > 1 or (tensor.dim() == 1 and not tensor.is_floating_point())
        if batch is not None and has_samples and sizes[0] == samples:
            sizes[0] = min(batch, samples)
        for axis, size in (space or {}).items():
            if axis < tensor.dim():
                sizes[axis] = min(sizes[axis], size)
        return tensor.detach()[tuple(slice(size) for size in sizes)].contiguous()

    return list(map_tensors(piece, inputs))


def _grown(inputs: list[Any], axis: int, twice: bool = False) -> list[Any]:
    """Two more positions along an axis than before, or than twice as many, for every tensor that is as long there as
    the first. Even sizes stay even."""
    size = next((tensor.shape[axis] for tensor in tensors_in(inputs) if tensor.dim() > axis), 0)

    def longer(tensor: Tensor) -> Tensor:
        has_axis = tensor.dim() > axis and tensor.shape[axis] == size
        if not has_axis or (axis == 0 and tensor.dim() == 1 and tensor.is_floating_point()):
            return tensor
        return torch.cat([tensor, *[tensor] * twice, tensor.narrow(axis, 0, min(2, size))], axis)

    return list(map_tensors(longer, inputs))


def _resized(inputs: list[Any], old: int, new: int) -> list[Any]:
    """Every axis of size `old` with size `new`: both operands of a product have the axis that they share."""

    def piece(tensor: Tensor) -> Tensor:
        for axis in range(tensor.dim()):
            if tensor.shape[axis] == old:
                times = -(-new // old)
                tensor = torch.cat([tensor] * times, axis).narrow(axis, 0, new)
        return tensor.contiguous()

    return list(map_tensors(piece, inputs))


def _numbers_in(item: Any) -> list[Any]:
    """What is neither a tensor nor None."""
    return [leaf for leaf in named_leaves("", item).values() if not (leaf is None or isinstance(leaf, Tensor))]


def _with_other_numbers(item: Any) -> Any:
    """Every floating number three quarters of what it was, so that shares stay shares."""
    return map_leaves(lambda leaf: 0.75 * leaf if isinstance(leaf, float) else leaf, item)


def space_of(inputs: list[Any]) -> dict[int, int]:
    """Axis → its size in the first tensor, for the axes after sample and channel."""
    tensor = next((tensor for tensor in tensors_in(inputs) if tensor.dim() > 2), None)
    return {} if tensor is None else {axis: tensor.shape[axis] for axis in range(2, tensor.dim())}


def _odd(working: list[Any]) -> dict[int, int]:
    """A different odd size along each axis, none of them larger than the working one."""
    sizes = {}
    for place, (axis, size) in enumerate(space_of(working).items()):
        wanted = size - 1 - 2 * place
        sizes[axis] = max(wanted - (wanted + 1) % 2, min(size, LEAST_SPACE))
    return sizes


def in_layout(shape: str, tensor: Tensor) -> Tensor:
    """A tensor in the layout that the inputs of a shape have."""
    layouts = {CHANNELS_LAST: _channels_last, GAPS: _with_gaps}
    return layouts[shape](tensor) if shape in layouts else tensor


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=_FORMATS[tensor.dim()]) if tensor.dim() in _FORMATS else tensor


def _with_gaps(tensor: Tensor) -> Tensor:
    """The tensor as every second position of one twice as long, as a slice or an interleaved volume has."""
    if tensor.dim() < 1 or not tensor.numel():
        return tensor
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype, device=tensor.device)
    wide[..., ::2] = tensor
    return wide[..., ::2]
