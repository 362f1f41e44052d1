"""The volume in which an implicit GEMM's input is packed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from postlude.chain import Convolution
from postlude.plan.phases import Phases, phases_of
from postlude.plan.residues import Axis


@dataclass(frozen=True)
class Volume:
    """The packed input: padding in front of each axis, none behind it (see kernels/triton/pack.py).

    With strides it is divided by residue (see residues.py), and `padded` are the cells of one residue.
    """

    space: tuple[int, int, int]  # of the input
    kernel: tuple[int, int, int]
    padding: tuple[int, int, int]  # of the equivalent ordinary convolution
    width: int  # neighbouring outputs per row of the GEMM, a power of two
    group: int = 1  # the width of another GEMM that reads the same volume, also a power of two
    stride: tuple[int, int, int] = (1, 1, 1)

    @property
    def axes(self) -> list[Axis]:
        return [Axis(*sizes) for sizes in zip(self.space, self.kernel, self.stride, self.padding)]

    @property
    def has_residues(self) -> bool:
        return self.stride != (1, 1, 1)

    @property
    def residues(self) -> int:
        return math.prod(axis.residues for axis in self.axes)

    @property
    def padded(self) -> tuple[int, int, int]:
        sizes = zip(self.axes, self.space, self.padding)
        d, h, w = (axis.cells if self.has_residues else size + pad for axis, size, pad in sizes)
        return d, h, w

    @property
    def out(self) -> tuple[int, int, int]:
        d, h, w = (axis.out for axis in self.axes)
        return d, h, w

    @property
    def pitch(self) -> int:
        return self.padded[2]

    @property
    def plane(self) -> int:
        return self.padded[1] * self.padded[2]

    def position(self, place: tuple[int, int, int]) -> int:
        return place[0] * self.plane + place[1] * self.pitch + place[2]

    @property
    def sample_rows(self) -> int:
        """Rows of a packed sample: so many that every GEMM has a whole number of rows per sample."""
        longest = max(self.width, self.group)
        step = longest // math.gcd(longest, self.pitch)
        return -(-self.padded[0] * self.padded[1] // step) * step

    @property
    def tail_rows(self) -> int:
        """Rows of zeros after the last sample, which overlapping rows of the GEMM may read.

        With strides: of each residue, because otherwise reads past the last sample would meet another residue's inputs.
        """
        if self.has_residues:
            d, h, w = (axis.last_read() for axis in self.axes)
            return max(0, self.position((d, h, w)) // self.pitch + 1 - self.sample_rows)
        return -(-(max(self.width, self.group) + self.kernel[2] - 2) // self.pitch)

    def packed_rows(self, batch: int) -> int:
        """Rows in memory, of all residues."""
        return self.residues * (batch * self.sample_rows + self.tail_rows)

    @property
    def is_dense(self) -> bool:
        return self.padded[1:] == self.out[1:]

    @property
    def is_flat(self) -> bool:
        """Whether there is no padding at all: packed samples are then just the input's positions in order."""
        d, h, _ = self.space
        return not any(self.padding) and not self.has_residues and self.sample_rows == d * h

    def as_one_row(self) -> Volume:
        return Volume((1, 1, math.prod(self.space)), (1, 1, 1), (0, 0, 0), 1)

    @property
    def span(self) -> int:
        return self.width + self.kernel[2] - 1

    def tiles(self, rows: int) -> int:
        """Tiles per sample. Slices past the last output are not computed."""
        return -(-self.out[0] * self.plane // (rows * self.width))


def volume_for(conv: Convolution, space: tuple[int, ...], width: int, group: int = 1) -> Volume:
    """The packed volume of a convolution. In 2-D it has one slice."""
    plain = conv.as_plain()
    assert plain is not None
    missing = 3 - len(space)
    ones, zeros = (1,) * missing, (0,) * missing
    sizes = ((*ones, *space), (*ones, *conv.kernel), (*zeros, *plain.padding))
    return Volume(*sizes, width, group, (*ones, *plain.stride))  # type: ignore[arg-type]


def unfolded_volume(conv: Convolution, space: tuple[int, ...], taps: tuple[int, int]) -> Volume:
    """The volume of a partial im2col, with these taps along y and x in one packed position.

    Along an unfolded axis a position is an output, so there is nothing to shift or pad.
    """
    whole = volume_for(conv, space, 1)
    sizes = list(zip(whole.space, whole.kernel, whole.padding))
    for axis, count in zip((1, 2), taps):
        if count > 1:
            sizes[axis] = (whole.out[axis], 1, 0)
    room, kernel, padding = zip(*sizes)
    return Volume(room, kernel, padding, 1)


def phased_volume(conv: Convolution, space: tuple[int, ...]) -> tuple[Volume, Phases]:
    """The packed input of a convolution by phase, with the padding that any of its phases needs."""
    phases = phases_of(conv, space)
    d, h, w = (axis.size for axis in phases.axes)
    return Volume((d, h, w), (1, 1, 1), phases.front, 1), phases
