"""A strided transposed convolution, divided into phases.

Along an axis, input i contributes to output o by tap t if o + padding = i · stride + t. Outputs with the same remainder
modulo the stride form a phase: o = cell · stride + remainder reads every stride-th tap, and the next cell reads the
next input. Each phase is therefore a convolution of stride 1, and every tap belongs to exactly one phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from postlude.chain import Convolution


@dataclass(frozen=True)
class Phase:
    taps: int  # 0 is possible if the kernel is shorter than the stride: such outputs are just the bias
    first: int  # the first input that cell 0 reads; further taps read the following inputs
    residue: int  # of its taps modulo the stride
    outputs: int


@dataclass(frozen=True)
class Axis:
    size: int  # of the input
    kernel: int
    stride: int
    padding: int
    out: int

    def phase(self, remainder: int) -> Phase:
        cell, residue = divmod(remainder + self.padding, self.stride)
        taps = -(-max(0, self.kernel - residue) // self.stride)
        outputs = -(-max(0, self.out - remainder) // self.stride)
        return Phase(taps, cell - taps + 1, residue, outputs)

    def taps(self, remainder: int) -> tuple[int, ...]:
        """The taps of a phase, in the order of the inputs that they read."""
        phase = self.phase(remainder)
        return tuple(phase.residue + self.stride * tap for tap in reversed(range(phase.taps)))

    @property
    def most_taps(self) -> int:
        return -(-self.kernel // self.stride)

    @property
    def slots(self) -> int:
        """Slots for taps in the packed weight: for each residue as many as the longest phase has."""
        return self.stride * self.most_taps

    @property
    def cells(self) -> int:
        return -(-self.out // self.stride)

    @property
    def front(self) -> int:
        """Zeros in front of a packed row: enough for reads before it, for reads past the row before it, and for all
        cells."""
        least = self.cells - self.size
        for remainder in range(self.stride):
            phase = self.phase(remainder)
            if phase.taps and phase.outputs:
                behind = phase.outputs - 1 + phase.first + phase.taps - self.size
                least = max(least, -phase.first, behind)
        return max(0, least)


@dataclass(frozen=True)
class Phases:
    axes: tuple[Axis, Axis, Axis]

    @property
    def is_paired(self) -> bool:
        """Whether one program computes both phases along x, and then stores neighbours together."""
        return self.axes[2].stride == 2

    @property
    def programs(self) -> int:
        """Phases that run in separate programs."""
        d, h, w = (axis.stride for axis in self.axes)
        return d * h * (1 if self.is_paired else w)

    @property
    def front(self) -> tuple[int, int, int]:
        d, h, w = (axis.front for axis in self.axes)
        return d, h, w

    @property
    def slots(self) -> int:
        return math.prod(axis.slots for axis in self.axes)

    def __str__(self) -> str:
        return f"one for each of {math.prod(axis.stride for axis in self.axes)} phases"


def has_phases(conv: Convolution) -> bool:
    """Whether our GEMMs by phase can run this convolution."""
    return (
        conv.transposed
        and any(size != 1 for size in conv.stride)
        and conv.groups == 1
        and all(size == 1 for size in conv.dilation)
        and all(0 <= p < k for p, k in zip(conv.padding, conv.kernel))
    )


def phases_of(conv: Convolution, space: tuple[int, ...]) -> Phases:
    """The phases of a convolution. In 2-D the first axis has size one."""
    out = conv.output_space(space)
    axes = [Axis(*sizes) for sizes in zip(space, conv.kernel, conv.stride, conv.padding, out)]
    d, h, w = [Axis(1, 1, 1, 0, 1)] * (3 - len(axes)) + axes
    return Phases((d, h, w))
