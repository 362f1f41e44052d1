"""Our implicit GEMM as a value: its arithmetic and tiles."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from postlude.card_tiles import TileOrigin
from postlude.chain import Convolution
from postlude.plan.phases import Phases
from postlude.plan.volume import Volume

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
    origin: TileOrigin | None = field(default=None, compare=False)  # of its tile; None in float64, which is not tuned

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
        rows = batch * volume.sample_rows * volume.residues
        return rows * volume.pitch * self.channels * 2 * self.arithmetic.planes

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
        if self.volume.has_residues:
            each = f"; by {self.volume.residues} residues modulo the stride"
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
    origin: TileOrigin | None = field(default=None, compare=False)  # as in `Gemm`

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
        return dataclasses.replace(self.volume, space=self.volume.out, padding=(d, h, w), stride=(1, 1, 1))

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


def padded_channels(channels: int) -> int:
    """Channels per position in memory: a multiple of 16, so that rows are aligned as a descriptor needs."""
    return -(-channels // 16) * 16


def input_gradient_of(conv: Convolution, space: tuple[int, ...]) -> Convolution:
    """The convolution that computes the input's gradient, of spatial size `space`, from the result's: the transpose,
    with the same weight."""
    turned = dataclasses.replace(
        conv,
        transposed=not conv.transposed,
        in_channels=conv.out_channels,
        out_channels=conv.in_channels,
        output_padding=(0,) * conv.dims,
        has_bias=False,
        dtype=None,
    )
    if conv.transposed:
        return turned
    # Inputs behind the last tap of the last output have no gradient.
    least = turned.output_space(conv.output_space(space))
    return dataclasses.replace(turned, output_padding=tuple(size - had for size, had in zip(space, least)))


def unsupported(conv: Convolution) -> str | None:
    """Why our stride-1 GEMM cannot run this convolution, whatever follows it; None if it can."""
    is_strided = any(size != 1 for size in conv.stride)
    padded = conv if is_strided else conv.as_plain()
    if conv.groups != 1:
        return "Postlude has no kernel for grouped convolutions"
    if any(size != 1 for size in conv.dilation):
        return "Postlude has no kernel for dilated convolutions"
    if padded is None or any(not 0 <= p < max(k, 1) for p, k in zip(padded.padding, padded.kernel)):
        return "the padding is wider than the kernel reaches"
    return "Postlude has no kernel for strides other than 1" if is_strided else None
