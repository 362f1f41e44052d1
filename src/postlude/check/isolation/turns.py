"""Where the inputs of timed calls lie: every call of a window reads another place of one pool.

Both ends use this file, so it imports no more of Postlude than `wire` does. All variants read pools of the same size,
however many calls they make in a window, so that their caches are in the same state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.check.isolation.wire import extent_of

ALIGNMENT = 128  # bytes: a line of a GPU's cache, and more than any vector load needs
PLACES = 1 << 14  # a window of 50 ms has no more calls unless one takes 3 µs
HEAP_BYTES = 31 << 20  # just below the largest block that glibc learns from
SPARE = 3  # times the input's own size, for places to lie apart
MOST_SPARE_BYTES = 256 << 20  # more than any cache: large inputs must fit beside their pool


def pool_length(extent: int, itemsize: int) -> int:
    """Elements of a pool for an input that spans `extent` elements."""
    spare = min(SPARE * extent, MOST_SPARE_BYTES // itemsize)
    return extent + max(spare, PLACES * (ALIGNMENT // itemsize))


def view_at(pool: Tensor, shape: Sequence[int], strides: Sequence[int], place: int) -> Tensor:
    """The input number `place` of a pool."""
    step = ALIGNMENT // pool.element_size()
    room = (pool.numel() - extent_of(shape, strides)) // step
    return pool.as_strided(shape, strides, place * room // PLACES * step)


def settle_heap() -> None:
    """Brings the C library's heap into the state of a process that has run for a while.

    Once it has freed a block of this size, glibc takes smaller ones from its heap, and does not give them back to the
    system after every call. Without this an honest candidate on a CPU took twice as long as the same model here.
    """
    torch.empty(HEAP_BYTES, dtype=torch.uint8)
