"""A chain's producer: a convolution, its transpose, or a linear layer."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from postlude.windows import brief


@dataclass(frozen=True)
class Convolution:
    """A convolution or its transpose; its input, weight and bias are the chain's first slots.

    One without spatial axes is a linear layer (see `linear`): its features are the channels, its weight is [out, in].
    """

    transposed: bool
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int = 1
    has_bias: bool = False
    # The dtype to which input, weight and bias are cast first: autocast's if it was on, else None.
    dtype: str | None = None

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def name(self) -> str:
        return f"conv{'_transpose' if self.transposed else ''}{self.dims}d" if self.kernel else "linear"

    @property
    def is_linear(self) -> bool:
        return not self.kernel

    def as_plain(self) -> Convolution | None:
        """A stride-1 transposed convolution as the equivalent ordinary one, whose taps are flipped; else None."""
        if not self.transposed:
            return self
        if any(size != 1 for size in self.stride) or any(self.output_padding) or self.groups != 1:
            return None
        padding = tuple(d * (k - 1) - p for d, k, p in zip(self.dilation, self.kernel, self.padding))
        return None if min(padding) < 0 else dataclasses.replace(self, transposed=False, padding=padding)

    def output_space(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """The spatial size of the result for an input of spatial size `space`."""
        return tuple(self.output_size(axis, size) for axis, size in enumerate(space))

    def output_size(self, axis: int, size: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1)
        if self.transposed:
            full = (size - 1) * self.stride[axis] + reach + 1
            return full - 2 * self.padding[axis] + self.output_padding[axis]
        return (size + 2 * self.padding[axis] - reach - 1) // self.stride[axis] + 1

    def flops(self, batch: int, space: tuple[int, ...]) -> int:
        """Operations, two per multiply-add. A transposed convolution's cropped outputs count as well."""
        places = batch * math.prod(space if self.transposed else self.output_space(space))
        return 2 * places * math.prod(self.kernel) * self.in_channels * self.out_channels // self.groups

    def __str__(self) -> str:
        words = [f"{self.in_channels}→{self.out_channels}"]
        words += [] if self.is_linear else [f"k{brief(self.kernel)}"]
        sizes_by_letter = {"s": self.stride, "p": self.padding, "op": self.output_padding, "d": self.dilation}
        for letter, sizes in sizes_by_letter.items():
            usual = 1 if letter in "sd" else 0
            if any(size != usual for size in sizes):
                words.append(f"{letter}{brief(sizes)}")
        if self.groups != 1:
            words.append(f"g{self.groups}")
        if self.dtype is not None:
            words.append(self.dtype)
        return f"{self.name}({', '.join(words)})"


def linear(in_features: int, out_features: int, has_bias: bool = False, dtype: str | None = None) -> Convolution:
    """x · Wᵀ + b over rows of features: [N, in] → [N, out]."""
    return Convolution(False, in_features, out_features, (), (), (), (), (), 1, has_bias, dtype)
