"""A bounded piece of what a chain received, to check the chain on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from postlude.chain import Chain, Role

SAMPLES = 2
LARGEST = {2: 64, 3: 16}  # positions along each spatial axis


def crop(chain: Chain, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies of the tensors, full-size ones cut to the same small batch and corner of space; layouts are kept."""
    space = tuple(tensors[0].shape[2:])
    reach = (1,) * chain.dims if chain.producer is None else chain.producer.kernel
    cut = tuple(min(size, max(LARGEST[chain.dims], 2 * need)) for size, need in zip(space, reach))
    after = cut if chain.producer is None else chain.producer.output_space(cut)
    sizes = {"input": cut, "full": after}
    sizes["row"] = (1,) * chain.dims
    return tuple(_cut(tensor.detach(), role, sizes, after) for tensor, role in zip(tensors, chain.roles))


def _cut(tensor: Tensor, role: Role, sizes: dict[str, tuple[int, ...]], after: tuple[int, ...]) -> Tensor:
    if role == "last":  # with all channels, where they belong to the row as well
        axes = tensor.dim()
        return tensor[tuple(map(slice, (*[None] * (axes - len(after)), *after[-axes:])))].clone()
    return _corner(tensor, sizes[role]) if role in sizes else tensor.clone()


def _corner(tensor: Tensor, space: tuple[int, ...]) -> Tensor:
    where = (slice(SAMPLES), slice(None), *map(slice, space))
    return tensor[where].clone()
