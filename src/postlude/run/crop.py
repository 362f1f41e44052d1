"""Crops of a chain's tensors, on which the chain is checked."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from postlude.chain import Chain, Role

_OF_THE_BATCH = ("input", "full", "row")  # roles of tensors that have a batch axis


def of_batch(chain: Chain, tensors: Sequence[Tensor], samples: slice) -> list[Tensor]:
    """Copies with only these samples; layouts are kept."""
    return [t[samples].clone() if role in _OF_THE_BATCH else t for t, role in zip(tensors, chain.roles)]


def cut_space(chain: Chain, tensors: Sequence[Tensor], space: tuple[int, ...]) -> list[Tensor]:
    """Copies of a corner of this size; layouts are kept."""
    after = space if chain.producer is None else chain.producer.output_space(space)
    sizes = {"input": space, "full": after, "row": (1,) * chain.dims}
    return [_cut(tensor, role, sizes, after) for tensor, role in zip(tensors, chain.roles)]


def _cut(tensor: Tensor, role: Role, sizes: dict[str, tuple[int, ...]], after: tuple[int, ...]) -> Tensor:
    if role == "last":  # with all channels, if the row includes them
        axes = tensor.dim()
        return tensor[tuple(map(slice, (*[None] * (axes - len(after)), *after[-axes:])))].clone()
    if role not in sizes:
        return tensor
    where = (slice(None), slice(None), *map(slice, sizes[role]))
    return tensor[where].clone()
