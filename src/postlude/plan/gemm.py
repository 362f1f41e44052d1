"""Our own convolution as a value: its arithmetic, the packed volume that it reads, its tiles."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from postlude.chain import Convolution
from postlude.plan.phases import Phases, phases_of

SHARED_BESIDE = 5 << 10  # bytes for barriers, and for warps to add up moments: up to 4 KiB were seen


@dataclass(frozen=True)
class Arithmetic:
    """What the tensor cores are given: a dtype, one plane or two, scaled by powers of two or not."""

    operands: str
    planes: int = 1
    scaled: bool = False
    keeps_infinities: bool = False  # in scaled planes: no norm follows that would make NaN of them

    @property
    def is_exact(self) -> bool:
        """For checking only: no card is fast at it."""
        return self.operands == "float64"

    @property
    def flags_infinities(self) -> bool:
        """Whether packing says that there was one: in one plane an infinity takes care of itself."""
        return self.keeps_infinities and self.planes == 2

    @property
    def products(self) -> int:
        """Of planes, for one of the operands."""
        return {1: 1, 2: 3}[self.planes]

    def __str__(self) -> str:
        planes = {1: "", 2: " in two planes"}[self.planes]
        return f"{self.operands}{planes}{', scaled' if self.scaled else ''}"


@dataclass(frozen=True)
class Volume:
    """The packed input: in front of each axis the padding, behind it nothing (see kernels/triton/pack.py)."""

    space: tuple[int, int, int]  # of the input
    kernel: tuple[int, int, int]
    padding: tuple[int, int, int]  # of the equivalent convolution that gathers
    width: int  # neighbouring outputs of one row of the product
    group: int = 1  # the same for another product that reads it: a power of two, as the width is

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
        """Rows of a packed sample: as many as hold a whole number of rows of every product."""
        longest = max(self.width, self.group)
        step = longest // math.gcd(longest, self.pitch)
        return -(-self.padded[0] * self.padded[1] // step) * step

    @property
    def tail_rows(self) -> int:
        """Rows behind the last sample that overlapping rows of the product may read; zero as well."""
        return -(-(max(self.width, self.group) + self.kernel[2] - 2) // self.pitch)

    @property
    def is_dense(self) -> bool:
        return self.padded[1:] == self.out[1:]

    @property
    def is_flat(self) -> bool:
        """No border anywhere: the packed samples are the input's positions one after the other, like one long row."""
        d, h, _ = self.space
        return not any(self.padding) and self.sample_rows == d * h

    def as_one_row(self) -> Volume:
        return Volume((1, 1, math.prod(self.space)), (1, 1, 1), (0, 0, 0), 1)

    @property
    def span(self) -> int:
        return self.width + self.kernel[2] - 1

    def tiles(self, rows: int) -> int:
        """Tiles of a sample: planes behind the last output are not computed."""
        return -(-self.out[0] * self.plane // (rows * self.width))


@dataclass(frozen=True)
class Gemm:
    """One way of running the product."""

    arithmetic: Arithmetic
    volume: Volume
    channels: int  # of a packed position: the input's, padded
    rows: int  # of a tile
    block_c: int  # output channels of a tile
    block_k: int
    stages: int
    warps: int
    phases: Phases | None = None  # where the convolution is transposed and has strides
    unfolded: tuple[int, int] = (1, 1)  # taps along y and x whose channels lie side by side in a packed position

    @property
    def depth(self) -> int:
        """Elements of a packed weight's plane for one output channel."""
        if self.phases is not None:
            return self.phases.slots * self.channels
        kd, kh, _ = self.volume.kernel
        return kd * kh * self.volume.span * self.channels

    @property
    def tiles(self) -> int:
        """Of a sample and, where there are phases, of each that is a program of its own."""
        if self.phases is None:
            return self.volume.tiles(self.rows)
        return -(-self.phases.axes[0].cells * self.volume.plane // self.rows)

    @property
    def chunks(self) -> int:
        """Parts in which a sample's moments come."""
        return self.tiles * (1 if self.phases is None else self.phases.programs)

    @property
    def columns(self) -> int:
        return self.volume.width * self.block_c

    def packed_bytes(self, batch: int) -> int:
        """Of the packed input, in all planes."""
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
    """One way of running the product that gives the weight's gradient: over positions, in stretches."""

    arithmetic: Arithmetic
    volume: Volume  # of the packed input
    channels: int  # of a packed position, of the input and of the gradient, padded
    out_channels: int
    neighbours: int  # positions of one row of the product
    shared: int  # tiles of the input for one of the gradient: taps along x, or along y where there are neighbours
    rows: int  # of a tile: output channels
    columns: int  # of a tile: input channels
    block_k: int
    splits: int
    stages: int
    warps: int
    turned: bool = False  # what the tensor cores multiply has the columns of the product for rows

    @property
    def groups(self) -> int:
        """Of taps that programs share out among themselves."""
        kd, kh, kw = self.volume.kernel
        return kd * kh * (kw if self.neighbours == 1 else 1) // self.shared

    @property
    def groups_of_a_row(self) -> int:
        """Of the taps along x; neighbours have them all in one tile."""
        return self.volume.kernel[2] // self.shared if self.neighbours == 1 else 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block at most: one tile of the gradient and the input's in every stage, and the rest."""
        item = 8 if self.arithmetic.is_exact else 2
        tiles = self.rows + self.shared * self.columns
        return item * self.arithmetic.planes * tiles * self.block_k * self.stages + SHARED_BESIDE

    @property
    def result(self) -> tuple[int, int]:
        """Rows and columns of the product: output channels, and input channels of each position that a row reads."""
        positions = 1 if self.neighbours == 1 else self.neighbours - 1 + self.volume.kernel[2]
        return self.neighbours * self.out_channels, positions * self.channels

    @property
    def gradient_volume(self) -> Volume:
        """The gradient in a volume of the input's pitch: what its rows, planes and samples lack lies in front."""
        d, h, w = (whole - out for whole, out in zip(self.volume.padded, self.volume.out))
        return dataclasses.replace(self.volume, space=self.volume.out, padding=(d, h, w))

    @property
    def shift(self) -> int:
        """Positions by which a gradient lies behind its output's."""
        return self.volume.position(self.gradient_volume.padding)

    @property
    def front(self) -> int:
        """Rows of zeros before the input: 1 where neighbours begin in the middle of one, and a row before the first
        would hold the input's first positions, which no descriptor reads."""
        first, reach = self.volume.position(self.volume.padding), self.neighbours + self.volume.kernel[2] - 2
        return int(self.shift % self.neighbours > 0 and first < reach)


def volume_for(conv: Convolution, space: tuple[int, ...], width: int, group: int = 1) -> Volume:
    """Two-dimensional convolutions have one plane."""
    plain = conv.as_plain()
    assert plain is not None
    missing = 3 - len(space)
    ones, zeros = (1,) * missing, (0,) * missing
    return Volume((*ones, *space), (*ones, *conv.kernel), (*zeros, *plain.padding), width, group)  # type: ignore[arg-type]


def unfolded_volume(conv: Convolution, space: tuple[int, ...], taps: tuple[int, int]) -> Volume:
    """The packed input where the channels of these taps along y and x lie side by side: along an axis whose taps do,
    a position is an output, and nothing is left to shift or to pad."""
    whole = volume_for(conv, space, 1)
    sizes = list(zip(whole.space, whole.kernel, whole.padding, whole.out))
    for axis, count in zip((1, 2), taps):
        if count > 1:
            sizes[axis] = (whole.out[axis], 1, 0, whole.out[axis])
    room, kernel, padding, _ = zip(*sizes)
    return Volume(room, kernel, padding, 1)


def padded_channels(channels: int) -> int:
    """Of a position in memory: a multiple of 16, so that a tile's rows begin where a descriptor may."""
    return -(-channels // 16) * 16


def phased_volume(conv: Convolution, space: tuple[int, ...]) -> tuple[Volume, Phases]:
    """The packed input of a convolution by phase: in front of each axis what any of its phases needs."""
    phases = phases_of(conv, space)
    d, h, w = (axis.size for axis in phases.axes)
    return Volume((d, h, w), (1, 1, 1), phases.front, 1), phases


def input_gradient_of(conv: Convolution) -> Convolution:
    """The convolution that takes the result's gradient to the input's: the transpose, with the very same weight."""
    return dataclasses.replace(
        conv,
        transposed=not conv.transposed,
        in_channels=conv.out_channels,
        out_channels=conv.in_channels,
        has_bias=False,
        dtype=None,
    )


def unsupported(conv: Convolution) -> str | None:
    """Why no convolution of ours with stride 1 can be it, whatever follows it; None where one can."""
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
