"""Bounded pieces of what a chain received, to check the chain on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from postlude.chain import Chain, Role

_OF_THE_BATCH = ("input", "full", "row")  # roles of the tensors with one part for each sample


def of_batch(chain: Chain, tensors: Sequence[Tensor], samples: slice) -> list[Tensor]:
    """Copies with these samples alone; layouts are kept."""
    return [t[samples].clone() if role in _OF_THE_BATCH else t for t, role in zip(tensors, chain.roles)]


def cut_space(chain: Chain, tensors: Sequence[Tensor], share: float) -> list[Tensor]:
    """Copies of a corner of space that holds about `share` of it, and no less than two kernels' reach.

    The last axis is cut last, so that rows and with them the alignment of tiles stay as long as they can.
    """
    space = tuple(tensors[0].shape[2:])
    reach = (1,) * chain.dims if chain.producer is None else chain.producer.kernel
    least = [min(size, max(4, 2 * need)) for size, need in zip(space, reach)]
    cut = list(space)
    for axis in range(chain.dims):
        left = share * math.prod(space) / math.prod(cut)
        cut[axis] = max(least[axis], min(cut[axis], int(left * cut[axis])))
    after = tuple(cut) if chain.producer is None else chain.producer.output_space(tuple(cut))
    sizes = {"input": tuple(cut), "full": after, "row": (1,) * chain.dims}
    return [_cut(tensor, role, sizes, after) for tensor, role in zip(tensors, chain.roles)]


def _cut(tensor: Tensor, role: Role, sizes: dict[str, tuple[int, ...]], after: tuple[int, ...]) -> Tensor:
    if role == "last":  # with all channels, where they belong to the row as well
        axes = tensor.dim()
        return tensor[tuple(map(slice, (*[None] * (axes - len(after)), *after[-axes:])))].clone()
    if role not in sizes:
        return tensor
    where = (slice(None), slice(None), *map(slice, sizes[role]))
    return tensor[where].clone()
