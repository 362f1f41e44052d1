"""A convolution of few input channels of which only moments are needed: whether our CUDA kernel can run it, and how."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from postlude.chain import Chain, Convolution
from postlude.hardware import Machine
from postlude.plan.barriers import moments_only, norm_hides_infinities, rows_from
from postlude.plan.gemm import Arithmetic, unsupported
from postlude.plan.problem import Problem, body_dtype, fp32_mode
from postlude.plan.tiles import few_channels_use, row_for
from postlude.plan.volume import volume_for

WIDTH = 32  # outputs of a tile along the last axis
_MOST_FRAGMENTS = 4  # their accumulators must fit in registers
_LEAST_ROUNDS = 4  # of all warps over a tile
RESERVED = 1 << 10  # bytes of each block's shared memory that CUDA reserves
STATIC = 3 << 9  # upper bound of the kernel's static shared memory: offsets of taps, exponents


@dataclass(frozen=True)
class FewChannels:
    """One way to run the kernel. fp32 input is split into scaled fp16 planes or rounded to one bf16 plane."""

    operand: str  # "float16" or "bfloat16"
    planes: int  # 2: fp32 input with fp32's precision
    depth: int  # outputs of a tile along the first axis and along the second
    height: int
    rows: int = 2  # rows of 32 outputs that a warp computes together; divides the height
    warps: int = 8
    blocks: int = 2  # per multiprocessor, which bounds the registers
    programs: int = 0  # 0: one per tile

    def tiles(self, out: tuple[int, int, int]) -> tuple[int, int, int]:
        """Tiles per sample along each axis."""
        return -(-out[0] // self.depth), -(-out[1] // self.height), -(-out[2] // WIDTH)

    def __str__(self) -> str:
        planes = " in two planes" if self.planes == 2 else ""
        return f"direct, products of {self.operand}{planes}; tiles of {self.depth} × {self.height} × {WIDTH}"


@dataclass(frozen=True)
class StoredFewChannels:
    """The same convolution, whose result is stored: a first pass of its own, before any step."""

    how: FewChannels
    keeps_infinities: bool

    @property
    def arithmetic(self) -> Arithmetic:
        is_scaled = self.how.operand == "float16"
        return Arithmetic(self.how.operand, self.how.planes, is_scaled, self.keeps_infinities)

    def __str__(self) -> str:
        return str(self.how)


@dataclass(frozen=True)
class Geometry:
    """What the kernel is compiled for, besides its settings."""

    cin: int
    cout: int
    kernel: tuple[int, int, int]
    padding: tuple[int, int, int]  # of the equivalent ordinary convolution
    flip: bool  # read the taps in reverse order, as a transposed convolution does
    dtype: str

    def output(self, space: tuple[int, ...]) -> tuple[int, int, int]:
        """The size of the output, for an input of this size."""
        sizes = zip(space, self.padding, self.kernel)
        d, h, w = (size + 2 * padding - taps + 1 for size, padding, taps in sizes)
        return d, h, w

    @property
    def fragments(self) -> int:
        """Fragments of 8 output channels in one block; blocks share the channels evenly."""
        return -(-self.cout // (8 * self.channel_blocks))

    @property
    def channel_blocks(self) -> int:
        return -(-self.cout // (8 * _MOST_FRAGMENTS))


def geometry_for(conv: Convolution, space: tuple[int, ...]) -> tuple[Geometry, tuple[int, int, int]]:
    """The geometry that the kernel is compiled for, and the size of the input."""
    volume = volume_for(conv, space, 1)
    sizes = (conv.in_channels, conv.out_channels, volume.kernel, volume.padding)
    return Geometry(*sizes, conv.transposed, ""), volume.space


def layout_of_tile(settings: FewChannels, shape: Geometry, slot_bytes: int) -> tuple[int, int]:
    """Slots of one slice of the staged input, and the tensor-core products per output."""
    kd, kh, kw = shape.kernel
    positions = 4 // shape.cin  # per slot
    chunks = -(-kw // positions)
    half = 64 // slot_bytes
    columns = WIDTH + (chunks - 1) * positions
    pitch = (columns + half - 1) // (2 * half) * (2 * half) + half
    plane = (settings.height + kh - 1) * pitch + (half if settings.height % 2 == 0 else 0)
    return plane, -(-kd * kh * chunks // 4)


def tile_slots(settings: FewChannels, shape: Geometry) -> int:
    """Slots for a staged tile, or for the moments of the block's lanes (12 bytes per channel) if those need more."""
    plane, _ = layout_of_tile(settings, shape, 8 * settings.planes)
    moments = settings.warps * 8 * shape.fragments * 8 * 12
    return max((settings.depth + shape.kernel[0] - 1) * plane, -(-moments // (8 * settings.planes)))


def shared_bytes(settings: FewChannels, shape: Geometry) -> int:
    """Dynamic shared memory of a block. The kernel asserts the same sum."""
    _, steps = layout_of_tile(settings, shape, 8 * settings.planes)
    return (tile_slots(settings, shape) + steps * shape.fragments * 32) * 8 * settings.planes


def few_channels_for(chain: Chain, problem: Problem, machine: Machine) -> FewChannels | str:
    """Settings for this card, or the reason why the kernel cannot run the chain."""
    moments = moments_only(chain)
    if moments is None or moments.before or not moments.squares:
        return "more than the convolution's own moments is needed"
    return _settings_for(chain, problem, machine)


def stored_few_channels_for(chain: Chain, problem: Problem, machine: Machine) -> StoredFewChannels | None:
    """The kernel that stores the convolution, where an implicit GEMM would write a partial im2col in two planes.

    That takes up to 43 bytes for each byte of the input, and this reads the input alone. More output channels than a
    block has would stage it again, and a small tile would leave warps idle. The result is stored before any step,
    contiguous, and only in inference. Infinities need slots of one tap.
    """
    conv, keeps = chain.convolution, not norm_hides_infinities(chain)
    if problem.needs_grad or moments_only(chain) is not None or rows_from(chain) is not None:
        return None
    if problem.x.layout != "contiguous" or problem.hands_on or (keeps and conv.in_channels < 3):
        return None
    how = _settings_for(chain, problem, machine)
    if isinstance(how, str) or how.planes != 2 or conv.out_channels > 8 * _MOST_FRAGMENTS:
        return None
    rounds = how.depth * how.height // (how.rows * how.warps)
    return StoredFewChannels(how, keeps) if rounds >= _LEAST_ROUNDS else None


def _settings_for(chain: Chain, problem: Problem, machine: Machine) -> FewChannels | str:
    conv = chain.producer
    if conv is None or conv.in_channels > 4 or max(conv.kernel) > 4:
        return "more than 4 input channels or taps"
    dtype = body_dtype(chain, problem)
    reason = unsupported(conv)
    if reason is not None or dtype == "float64" or not machine.has_nvrtc:
        return reason or ("float64" if machine.has_nvrtc else "NVRTC is not available to compile it")
    if math.prod(problem.x.shape[1:]) >= 1 << 30:
        return "a sample of more than 2³⁰ elements"
    planes = 2 if dtype == "float32" and fp32_mode(chain, problem) == "fp32" else 1
    operand = "float16" if dtype == "float32" else dtype
    return _fitted(FewChannels(operand, planes, 0, 0), chain, problem, machine)


def _fitted(settings: FewChannels, chain: Chain, problem: Problem, machine: Machine) -> FewChannels | str:
    """The tile from the tables, or the next smaller one of which as many blocks, or at least one, fit a
    multiprocessor."""
    conv = chain.convolution
    shape, space = geometry_for(conv, problem.x.shape[2:])
    out = shape.output(space)
    rows = machine.card.abilities.few_channel_rows
    most = row_for(machine, few_channels_use("few channels", conv, settings.planes, machine)).values
    for blocks in range(most["blocks"], 0, -1):
        for height in range(most["height"], 0, -2):
            tile = dataclasses.replace(
                settings,
                depth=_even_share(out[0], most["depth"]),
                height=-(-_even_share(out[1], height) // rows) * rows,
                rows=rows,
                blocks=blocks,
                programs=blocks * machine.card.multiprocessors,
            )
            if shared_bytes(tile, shape) <= machine.card.shared_bytes // blocks - RESERVED - STATIC:
                return tile
    return "no tile fits the card's shared memory"


def _even_share(size: int, most: int) -> int:
    """The size of each part, if `size` is divided evenly into the fewest parts of at most `most`."""
    return -(-size // -(-size // most))
