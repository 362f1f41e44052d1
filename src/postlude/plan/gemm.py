"""Our implicit GEMM as a value: its arithmetic, the packed volume that it reads, its tiles."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from postlude.chain import Convolution
from postlude.plan.phases import Phases, phases_of

SHARED_BESIDE = 5 << 10  # bytes for barriers and for the warps' sums of moments; at most 4 KiB were seen


@dataclass(frozen=True)
class Arithmetic:
    """What the tensor cores multiply: a dtype, one plane or two, scaled by powers of two or not."""

    operands: str
    planes: int = 1
    scaled: bool = False
    keeps_infinities: bool = False  # in scaled planes; needed unless a norm follows

    @property
    def is_exact(self) -> bool:
        """Whether it is float64, which is for checking only: no card is fast at it."""
        return self.operands == "float64"

    @property
    def flags_infinities(self) -> bool:
        """Whether packing must flag an infinity. With one plane the GEMM handles infinities without help."""
        return self.keeps_infinities and self.planes == 2

    @property
    def products(self) -> int:
        """Tensor-core products of planes for one product of the operands."""
        return {1: 1, 2: 3}[self.planes]

    def __str__(self) -> str:
        planes = {1: "", 2: " in two planes"}[self.planes]
        return f"{self.operands}{planes}{', scaled' if self.scaled else ''}"


@dataclass(frozen=True)
class Volume:
    """The packed input: padding in front of each axis, none behind it (see kernels/triton/pack.py)."""

    space: tuple[int, int, int]  # of the input
    kernel: tuple[int, int, int]
    padding: tuple[int, int, int]  # of the equivalent ordinary convolution
    width: int  # neighbouring outputs per row of the GEMM, a power of two
    group: int = 1  # the width of another GEMM that reads the same volume, also a power of two

    @property
    def padded(self) -> tuple[int, int, int]:
        d, h, w = (size + pad for size, pad in zip(self.space, self.padding))
        return d, h, w

    @property
    def out(self) -> tuple[int, int, int]:
        d, h, w = (s + 2 * p - k + 1 for s, p, k in zip(self.space, self.padding, self.kernel))
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
        """Rows of zeros after the last sample, which overlapping rows of the GEMM may read."""
        return -(-(max(self.width, self.group) + self.kernel[2] - 2) // self.pitch)

    @property
    def is_dense(self) -> bool:
        return self.padded[1:] == self.out[1:]

    @property
    def is_flat(self) -> bool:
        """Whether there is no padding at all: packed samples are then just the input's positions in order."""
        d, h, _ = self.space
        return not any(self.padding) and self.sample_rows == d * h

    def as_one_row(self) -> Volume:
        return Volume((1, 1, math.prod(self.space)), (1, 1, 1), (0, 0, 0), 1)

    @property
    def span(self) -> int:
        return self.width + self.kernel[2] - 1

    def tiles(self, rows: int) -> int:
        """Tiles per sample. Slices past the last output are not computed."""
        return -(-self.out[0] * self.plane // (rows * self.width))


@dataclass(frozen=True)
class Gemm:
    """One way to run the GEMM."""

    arithmetic: Arithmetic
    volume: Volume
    channels: int  # per packed position: the input's, padded
    rows: int  # of a tile
    block_c: int  # output channels of a tile
    block_k: int
    stages: int
    warps: int
    phases: Phases | None = None  # for a strided transposed convolution
    unfolded: tuple[int, int] = (1, 1)  # taps along y and x in one packed position (partial im2col)

    @property
    def depth(self) -> int:
        """K of the GEMM: elements in a plane of the packed weight for one output channel."""
        if self.phases is not None:
            return self.phases.slots * self.channels
        kd, kh, _ = self.volume.kernel
        return kd * kh * self.volume.span * self.channels

    @property
    def tiles(self) -> int:
        """Tiles per sample and, if there are phases, per phase that has programs of its own."""
        if self.phases is None:
            return self.volume.tiles(self.rows)
        return -(-self.phases.axes[0].cells * self.volume.plane // self.rows)

    @property
    def chunks(self) -> int:
        """Partial moments per sample."""
        return self.tiles * (1 if self.phases is None else self.phases.programs)

    @property
    def columns(self) -> int:
        return self.volume.width * self.block_c

    def packed_bytes(self, batch: int) -> int:
        """Bytes of the packed input in all planes."""
        volume = self.volume
        return batch * volume.sample_rows * volume.pitch * self.channels * 2 * self.arithmetic.planes

    @property
    def unfolds(self) -> bool:
        return self.unfolded != (1, 1)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block at most: both operands of every stage, and the rest."""
        item = 8 if self.arithmetic.is_exact else 2
        return item * self.arithmetic.planes * (self.rows + self.columns) * self.block_k * self.stages + SHARED_BESIDE

    def __str__(self) -> str:
        each = "" if self.phases is None else f"; {self.phases}"
        if self.unfolds:
            each = f"; {' × '.join(str(taps) for taps in self.unfolded if taps > 1)} taps side by side"
        tiles = f"tiles of {self.rows} × {self.columns} × {self.block_k}"
        return f"matrix product of {self.arithmetic}{each}; {tiles}"


@dataclass(frozen=True)
class WeightGemm:
    """One way to run the GEMM for the weight's gradient: split-K over positions."""

    arithmetic: Arithmetic
    volume: Volume  # of the packed input
    channels: int  # per packed position of input and gradient, padded
    out_channels: int
    neighbours: int  # positions per row of the GEMM
    shared: int  # tiles of the input per tile of the gradient: taps along x, or along y if there are neighbours
    rows: int  # of a tile: output channels
    columns: int  # of a tile: input channels
    block_k: int
    splits: int
    stages: int
    warps: int
    turned: bool = False  # A and B are swapped, so that the tensor cores compute the transpose

    @property
    def groups(self) -> int:
        """Groups of taps; a program has one group."""
        kd, kh, kw = self.volume.kernel
        return kd * kh * (kw if self.neighbours == 1 else 1) // self.shared

    @property
    def groups_of_a_row(self) -> int:
        """Groups of the taps along x; with neighbours one tile has all of them."""
        return self.volume.kernel[2] // self.shared if self.neighbours == 1 else 1

    @property
    def shared_bytes(self) -> int:
        """Upper bound of a block's shared memory: in each stage a tile of the gradient and the input's, and the
        rest."""
        item = 8 if self.arithmetic.is_exact else 2
        tiles = self.rows + self.shared * self.columns
        return item * self.arithmetic.planes * tiles * self.block_k * self.stages + SHARED_BESIDE

    @property
    def result(self) -> tuple[int, int]:
        """Rows and columns of the GEMM: output channels, and input channels of all positions that a row reads."""
        positions = 1 if self.neighbours == 1 else self.neighbours - 1 + self.volume.kernel[2]
        return self.neighbours * self.out_channels, positions * self.channels

    @property
    def gradient_volume(self) -> Volume:
        """The gradient's volume, with the input's pitch: shorter rows, slices and samples are padded in front."""
        d, h, w = (whole - out for whole, out in zip(self.volume.padded, self.volume.out))
        return dataclasses.replace(self.volume, space=self.volume.out, padding=(d, h, w))

    @property
    def shift(self) -> int:
        """Positions by which a gradient lies behind its output's position."""
        return self.volume.position(self.gradient_volume.padding)

    @property
    def front(self) -> int:
        """Rows of zeros before the input.

        1 if neighbours begin in the middle of a row: the row before the first then holds the first positions, and a
        descriptor cannot read before its start.
        """
        first, reach = self.volume.position(self.volume.padding), self.neighbours + self.volume.kernel[2] - 2
        return int(self.shift % self.neighbours > 0 and first < reach)


def volume_for(conv: Convolution, space: tuple[int, ...], width: int, group: int = 1) -> Volume:
    """The packed volume of a convolution. In 2-D it has one slice."""
    plain = conv.as_plain()
    assert plain is not None
    missing = 3 - len(space)
    ones, zeros = (1,) * missing, (0,) * missing
    return Volume((*ones, *space), (*ones, *conv.kernel), (*zeros, *plain.padding), width, group)  # type: ignore[arg-type]


def unfolded_volume(conv: Convolution, space: tuple[int, ...], taps: tuple[int, int]) -> Volume:
    """The volume of a partial im2col, with these taps along y and x in one packed position.

    Along an unfolded axis a position is an output, so there is nothing to shift or pad.
    """
    whole = volume_for(conv, space, 1)
    sizes = list(zip(whole.space, whole.kernel, whole.padding, whole.out))
    for axis, count in zip((1, 2), taps):
        if count > 1:
            sizes[axis] = (whole.out[axis], 1, 0, whole.out[axis])
    room, kernel, padding, _ = zip(*sizes)
    return Volume(room, kernel, padding, 1)


def padded_channels(channels: int) -> int:
    """Channels per position in memory: a multiple of 16, so that rows are aligned as a descriptor needs."""
    return -(-channels // 16) * 16


def phased_volume(conv: Convolution, space: tuple[int, ...]) -> tuple[Volume, Phases]:
    """The packed input of a convolution by phase, with the padding that any of its phases needs."""
    phases = phases_of(conv, space)
    d, h, w = (axis.size for axis in phases.axes)
    return Volume((d, h, w), (1, 1, 1), phases.front, 1), phases


def input_gradient_of(conv: Convolution) -> Convolution:
    """The convolution that computes the input's gradient from the result's: the transpose, with the same weight."""
    return dataclasses.replace(
        conv,
        transposed=not conv.transposed,
        in_channels=conv.out_channels,
        out_channels=conv.in_channels,
        has_bias=False,
        dtype=None,
    )


def unsupported(conv: Convolution) -> str | None:
    """Why our stride-1 GEMM cannot run this convolution, whatever follows it; None if it can."""
    plain = conv.as_plain()
    if conv.groups != 1:
        return "Postlude has no kernel for grouped convolutions"
    if any(size != 1 for size in conv.dilation):
        return "Postlude has no kernel for dilated convolutions"
    if any(size != 1 for size in conv.stride):
        return "Postlude has no kernel for strides other than 1"
    if plain is None or any(not 0 <= p < max(k, 1) for p, k in zip(plain.padding, plain.kernel)):
        return "the padding is wider than the kernel reaches"
    return None
