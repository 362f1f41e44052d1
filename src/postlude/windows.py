"""The windows of a pool, and which positions they cover."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Windows:
    """A pool's settings, one number per spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    is_ceil: bool = False  # ceil_mode: a last window that is only partly inside counts

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def lie_side_by_side(self) -> bool:
        """Whether each begins where the one before it ends, and all lie inside the value."""
        return self.stride == self.kernel and not any(self.padding) and not self.is_ceil

    def output_space(self, space: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.output_size(axis, size) for axis, size in enumerate(space))

    def output_size(self, axis: int, size: int) -> int:
        kernel, stride, padding = self.kernel[axis], self.stride[axis], self.padding[axis]
        more = stride - 1 if self.is_ceil else 0
        count = (size + 2 * padding - kernel + more) // stride + 1
        # The last window must begin inside the value or in the padding before it.
        return count - 1 if self.is_ceil and (count - 1) * stride >= size + padding else count

    def has_border(self, space: tuple[int, ...]) -> bool:
        """Whether a window covers positions outside the value."""
        ends = [(n - 1) * s + k for n, s, k in zip(self.output_space(space), self.stride, self.kernel)]
        return any(self.padding) or any(end > size for end, size in zip(ends, space))

    def of_one_position(self) -> tuple[int, ...]:
        """The most windows along each axis that cover one position."""
        return tuple(-(-kernel // stride) for kernel, stride in zip(self.kernel, self.stride))

    def joined(self, after: Windows, may_overlap: bool) -> Windows | None:
        """The windows of one pool that equals this pool followed by another, or None.

        There is one if the windows have no border and no gaps and, unless they `may_overlap`, each position is in only
        one window of this pool.
        """
        if any((*self.padding, *after.padding, self.is_ceil, after.is_ceil)):
            return None
        if any(s > k or (s < k and not may_overlap) for s, k in zip(self.stride, self.kernel)):
            return None
        kernel = tuple(k + (more - 1) * s for k, s, more in zip(self.kernel, self.stride, after.kernel))
        stride = tuple(s * more for s, more in zip(self.stride, after.stride))
        return Windows(kernel, stride, self.padding)

    def __str__(self) -> str:
        words = [brief(self.kernel)]
        if self.stride != self.kernel:
            words.append(f"s{brief(self.stride)}")
        if any(self.padding):
            words.append(f"p{brief(self.padding)}")
        return ", ".join([*words, *(["ceil"] if self.is_ceil else [])])


def per_axis(sizes: Any, dims: int) -> tuple[int, ...]:
    """One size per axis, from PyTorch's arguments: one number for all axes, or one for each."""
    given = (sizes,) if isinstance(sizes, int) else tuple(int(size) for size in sizes)
    return given * dims if len(given) == 1 else given


def brief(sizes: tuple[int, ...]) -> str:
    """Sizes along each axis: one number if all are equal."""
    return str(sizes[0]) if len(set(sizes)) == 1 else "×".join(map(str, sizes))
