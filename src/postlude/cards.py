"""GPUs as values: a card's sizes, abilities, rates and tiles.

No other file makes a decision by an architecture's name. The H200's figures were measured, except `library_last`.
Those of other cards come from NVIDIA's publications or from the driver's properties, and say so.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Literal

from postlude import card_tiles
from postlude.card_tiles import Tiles

Figures = Literal["measured", "published", "estimated"]
WGMMA_ROWS = 64  # rows of Hopper's wgmma instruction
_OLDEST = 80  # Ampere: kernels are not compiled or tested for anything older


@dataclass(frozen=True)
class ByMode:
    """One figure for each arithmetic of PyTorch's convolutions."""

    fp32: float
    tf32: float
    half: float  # fp16 and bf16, summed in fp32

    def __getitem__(self, mode: str) -> float:
        return {"fp32": self.fp32, "tf32": self.tf32, "16 bits": self.half}[mode]

    def times(self, other: ByMode) -> ByMode:
        return ByMode(self.fp32 * other.fp32, self.tf32 * other.tf32, self.half * other.half)


@dataclass(frozen=True)
class Abilities:
    has_tma: bool = False  # TMA: hardware copies boxes of a tensor by a descriptor that the host makes
    has_wgmma: bool = False  # operands come from shared memory, so registers are free for accumulators
    few_channel_rows: int = 1  # rows that a warp of the few-channel kernel computes together without spilling
    has_few_channel_gradients: bool = False  # their kernel was measured to be faster than cuDNN's

    @property
    def reads_boxes_in_place(self) -> bool:
        """Whether the GEMM can read TMA boxes in place: wgmma takes a reshaped box, mma.sync would load it to
        registers."""
        return self.has_tma and self.has_wgmma

    @property
    def has_weight_gradients(self) -> bool:
        """Whether our weight gradient is used: without wgmma operands take registers too, and its accumulators
        spill."""
        return self.has_wgmma


@dataclass(frozen=True)
class Rates:
    """Rates in operations or bytes per second."""

    peak: ByMode  # dense
    bandwidth: float  # of memory, as published
    library: ByMode  # PyTorch's convolutions, contiguous in 3-D
    library_flat: float  # factor for 2-D on tensor cores
    library_last: float  # factor for channels-last
    product: float  # our implicit GEMM
    cache: float  # from L2 to shared memory
    copy: float  # of memory, read plus written
    # By the depth of a GEMM's step: the share of `cache` that short steps reach.
    short_steps: tuple[tuple[int, float], ...] = ((64, 1.0), (32, 0.85), (16, 0.5))


@dataclass(frozen=True)
class Crossovers:
    """The sizes from which our kernels pay. Below them the host time of launches dominates."""

    packing: ByMode  # operations of a convolution; below this, packing costs more than a faster GEMM gains
    # Bytes of a result from which moments in the epilogue are worth our launches even if cuDNN's convolution is as
    # fast. On an H200 2×128→128×32³ (16 MiB) takes 0.15 to 0.17 ms with cuDNN, and 0.24 to 0.25 ms of host time with
    # ours.
    reading: int
    smallest: int  # bytes of a value; below this, three launches take more host time than they save on the card
    # The same in training, unless PyTorch's three convolutions take at least `step_seconds`, the host time of one of
    # our steps (2×128→128×32³ in fp16: 1.0 to 1.2 ms, eager 0.8 to 1.0).
    smallest_trained: int
    # The same under autocast for a chain behind PyTorch's convolution whose graph Inductor compiles: Inductor reads and
    # writes such a value as often as our passes do, and a chain takes 0.2 ms more of host time (inference of MONAI's
    # UNet on an H200, four chains of 8 to 32 MiB: 1.72 ms, 0.89 without them, for 1.0 ms of work). From 64 MiB on the
    # passes take 0.1 ms, so the GPU has work for as long as the host needs.
    smallest_by_inductor: int = 64 << 20
    step_seconds: float = 1e-3
    trained_channels: int = 64  # of an input; above this, cuDNN's gradients are faster in 16 bits
    in_place_channels: int = 128  # of input and output; above this, cuDNN is faster (485 to 674 TFLOP/s on an H200)


@dataclass(frozen=True)
class Card:
    name: str
    architecture: str  # "sm_90" on an NVIDIA card, "gfx942" on an AMD one
    multiprocessors: int
    shared_bytes: int  # most shared memory of one block; 0: unknown
    l2_bytes: int
    rates: Rates
    crossovers: Crossovers
    abilities: Abilities
    tiles: Tiles
    figures: Figures

    @property
    def is_served(self) -> bool:
        return _number(self.architecture) >= _OLDEST

    @property
    def is_measured(self) -> bool:
        return self.figures == "measured"

    def holds(self, shared_bytes: int) -> bool:
        """Whether one block may use so much shared memory."""
        return not self.shared_bytes or shared_bytes <= self.shared_bytes

    def __str__(self) -> str:
        return f"{self.name}: {_WORDS[self.figures]}"


_WORDS: dict[Figures, str] = {
    "measured": "its rates and tiles were measured",
    "published": "its rates come from published figures, not measured",
    "estimated": "its rates are estimated from its multiprocessors, clock and memory bus, not measured",
}


@dataclass(frozen=True)
class _Family:
    """What the cards of an architecture have in common."""

    per_clock: ByMode  # operations per clock of a multiprocessor
    l2_per_clock: int  # bytes per clock from L2 to a multiprocessor
    # The share of the peak that PyTorch's convolutions are assumed to reach. It is generous where nothing was measured:
    # ours is then chosen only if it should win clearly.
    library: ByMode = ByMode(0.6, 0.4, 0.4)
    library_flat: float = 1.5
    library_last: float = 1.25
    abilities: Abilities = Abilities()
    tiles: Tiles = card_tiles.OTHERS


_PRODUCT, _COPY = 0.5, 0.83  # of the peak, of the bandwidth: the H200's shares
_H200_RATES = Rates(
    peak=ByMode(66.9e12, 494.7e12, 989.4e12),
    bandwidth=4.8e12,
    library=ByMode(16e12, 100e12, 250e12),
    library_flat=2.0,
    library_last=1.5,  # not measured
    product=500e12,
    cache=8e12,
    copy=4e12,
)
_H200_CROSSOVERS = Crossovers(ByMode(1e9, 8e9, 20e9), 32 << 20, 8 << 20, 32 << 20)
_HOPPER = _Family(
    ByMode(256, 2048, 4096),
    32,
    ByMode(0.24, 0.2, 0.25),  # the H200's
    _H200_RATES.library_flat,
    _H200_RATES.library_last,
    Abilities(has_tma=True, has_wgmma=True, few_channel_rows=2, has_few_channel_gradients=True),
    card_tiles.HOPPER,
)
_AMPERE = _Family(ByMode(128, 1024, 2048), 32, tiles=card_tiles.AMPERE)
_SMALL = ByMode(256, 512, 1024)  # a GeForce has half of this on tensor cores with fp32 accumulation
_FAMILIES = {
    80: _AMPERE,
    86: _Family(_SMALL, 16),
    89: _Family(_SMALL, 16),
    90: _HOPPER,
    100: _Family(ByMode(256, 4096, 8192), 32, _HOPPER.library, abilities=Abilities(has_tma=True)),  # cuDNN as on Hopper
    120: _Family(_SMALL, 16, abilities=Abilities(has_tma=True)),
}


def capability_of(architecture: str) -> tuple[int, int]:
    """(9, 0) for "sm_90"; (0, 0) for a card that is not NVIDIA's."""
    return divmod(_number(architecture), 10)


def _number(architecture: str) -> int:
    number = architecture.removeprefix("sm_")
    return int(number) if number != architecture and number.isdigit() else 0


def _family(architecture: str) -> _Family:
    """The family of the newest known architecture that is not newer than this one. Older ones and AMD's are refused."""
    number = _number(architecture)
    return _FAMILIES[max((known for known in _FAMILIES if known <= number), default=_OLDEST)]


Sizes = tuple[int, int, int]  # multiprocessors, bytes of a block's shared memory, bytes of L2


def estimated(
    name: str,
    architecture: str,
    sizes: Sizes,
    clock: float,
    bandwidth: float,
    peak: ByMode | None = None,
    figures: Figures = "estimated",
) -> Card:
    """A card without measurements. `clock` is in Hz, `bandwidth` in bytes per second; `peak` defaults to the
    clock's."""
    family, multiprocessors = _family(architecture), sizes[0]
    if peak is None:
        tensor = multiprocessors * clock * (0.5 if "GeForce" in name else 1.0)
        peak = family.per_clock.times(ByMode(multiprocessors * clock, tensor, tensor))
    rates = Rates(
        peak,
        bandwidth,
        library=peak.times(family.library),
        library_flat=family.library_flat,
        library_last=family.library_last,
        product=_PRODUCT * peak.half,
        cache=multiprocessors * clock * family.l2_per_clock,
        copy=_COPY * bandwidth,
    )
    return Card(name, architecture, *sizes, rates, _crossovers(rates), family.abilities, family.tiles, figures)


def _crossovers(rates: Rates) -> Crossovers:
    """The H200's crossovers, converted so that they take the same time: a launch costs the host the same on any card.

    Values of these sizes are in L2, so its rate converts sizes to seconds.
    """
    then, now = _H200_RATES, rates.library
    ratios = ByMode(now.fp32 / then.library.fp32, now.tf32 / then.library.tf32, now.half / then.library.half)
    sizes = (_H200_CROSSOVERS.reading, _H200_CROSSOVERS.smallest, _H200_CROSSOVERS.smallest_trained)
    return Crossovers(_H200_CROSSOVERS.packing.times(ratios), *(int(size * rates.cache / then.cache) for size in sizes))


_published = functools.partial(estimated, figures="published")
H200 = Card(
    "H200",
    "sm_90",
    132,
    232_448,
    50 << 20,
    _H200_RATES,
    _H200_CROSSOVERS,
    _HOPPER.abilities,
    card_tiles.HOPPER,
    "measured",
)
# Sizes, boost clock, memory, dense peaks.
H100 = _published("H100", "sm_90", (132, 232_448, 50 << 20), 1.83e9, 3.35e12, ByMode(66.9e12, 494.7e12, 989.4e12))
A100 = _published("A100", "sm_80", (108, 166_912, 40 << 20), 1.41e9, 2.039e12, ByMode(19.5e12, 156e12, 312e12))
L40S = _published("L40S", "sm_89", (142, 101_376, 96 << 20), 2.52e9, 0.864e12, ByMode(91.6e12, 183e12, 362e12))
B200 = _published("B200", "sm_100", (148, 232_448, 126 << 20), 1.86e9, 8e12, ByMode(75e12, 1125e12, 2250e12))
RTX_4090 = _published(
    "RTX 4090", "sm_89", (128, 101_376, 72 << 20), 2.52e9, 1.008e12, ByMode(82.6e12, 82.6e12, 165.2e12)
)
RTX_5090 = _published(
    "RTX 5090", "sm_120", (170, 101_376, 96 << 20), 2.41e9, 1.792e12, ByMode(104.8e12, 104.8e12, 209.5e12)
)
KNOWN = (H200, H100, A100, L40S, B200, RTX_4090, RTX_5090)
NO_CARD = estimated("no card", "", (1, 0, 0), 1e9, 1e12)  # for a machine without a GPU; its figures are never read


def card_for(name: str, architecture: str, sizes: Sizes, clock: float, bandwidth: float) -> Card:
    """The card that the driver calls `name`.

    One with fewer multiprocessors than its namesake, such as a MIG slice or a laptop version, is estimated. A `clock`
    or `bandwidth` of 0 means unknown.
    """
    multiprocessors, shared_bytes, l2_bytes = sizes
    for known in KNOWN:
        is_named = re.search(rf"\b{known.name}\b", name) is not None
        if is_named and (known.architecture, known.multiprocessors) == (architecture, multiprocessors):
            card = dataclasses.replace(known, shared_bytes=shared_bytes, l2_bytes=l2_bytes)
            return card if known.is_measured or not bandwidth else _with_bandwidth(card, bandwidth)
    return estimated(name, architecture, sizes, clock or _CLOCK, bandwidth or multiprocessors * _BANDWIDTH)


_CLOCK, _BANDWIDTH = 1.5e9, 10e9  # if the driver reports neither; bandwidth per multiprocessor


def _with_bandwidth(card: Card, bandwidth: float) -> Card:
    """The card with another bandwidth: cards of one name come with different memory."""
    rates = dataclasses.replace(card.rates, bandwidth=bandwidth, copy=_COPY * bandwidth)
    return dataclasses.replace(card, rates=rates)
