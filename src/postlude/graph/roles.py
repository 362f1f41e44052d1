"""The role in a chain of a tensor that is broadcast against its value, by PyTorch's rules."""

from __future__ import annotations

from typing import Any

from postlude.chain import Role
from postlude.graph.capture import same_shape


def vector_role(shape: tuple[Any, ...], other: tuple[Any, ...], is_of_rows: bool) -> Role | None:
    """The role of a vector over the second axis, as prelu reads it."""
    if not is_of_rows and same_shape(shape[1:2], other):
        return "channel"
    return "one" if are_ones(other) else None


def broadcast_role(shape: tuple[Any, ...], other: tuple[Any, ...], is_of_rows: bool) -> Role | None:
    """The role of a tensor that is broadcast against a value of `shape`, whose channels are its last axis if it
    `is_of_rows`."""
    if same_shape(shape, other):
        return "full"
    if len(other) > len(shape):
        return None
    padded = (1,) * (len(shape) - len(other)) + other
    if is_of_rows:
        if are_ones(padded[:-1]) and same_shape(shape[-1:], padded[-1:]):
            return "channel"
        return "one" if are_ones(padded) else None
    if not are_ones(padded[2:]):
        return None
    is_batch, is_channels = (same_shape(shape[axis : axis + 1], padded[axis : axis + 1]) for axis in (0, 1))
    if is_channels and are_ones(padded[:1]):
        return "channel"
    if is_channels and is_batch:
        return "row"
    return "one" if are_ones(padded) else None


def are_ones(sizes: tuple[Any, ...]) -> bool:
    return same_shape(sizes, (1,) * len(sizes))
