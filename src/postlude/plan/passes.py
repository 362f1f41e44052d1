"""A pass of a plan, *source → steps → sink*, and what carries out the passes over a value: Triton, C++ or PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from postlude.chain import Chain

Source = Literal["own convolution", "library convolution", "load"]


@dataclass(frozen=True)
class Keep:
    """The value stays in the slab, in cache, for the next pass."""

    def __str__(self) -> str:
        return "keep in cache"


@dataclass(frozen=True)
class Store:
    """The value is written to the result, in the layout that PyTorch would have given it."""

    raw: bool = False  # the convolution's result is written, before any step, for the next pass

    def __str__(self) -> str:
        return "store"


@dataclass(frozen=True)
class KeepMoments:
    """Only the mean and the sum of squared deviations per sample and channel are kept."""

    squares: bool  # False: the mean is all that is needed
    stores: bool = False  # the convolution's result is written as well, for the next pass
    finished: bool = False  # what is written is the value after the steps of this pass

    def __str__(self) -> str:
        return ("store, " if self.stores else "") + ("moments per channel" if self.squares else "mean per channel")


Sink = Keep | Store | KeepMoments


@dataclass(frozen=True)
class Pass:
    """Steps `first` to `last` (counted from 1, last included) of the chain, between one source and one sink."""

    source: Source
    first: int
    last: int
    sink: Sink


def first_source(chain: Chain) -> Source:
    return "load" if chain.producer is None else "library convolution"


def reads_moments(passes: tuple[Pass, ...]) -> bool:
    """Whether a separate pass over the value computes the moments, because no epilogue has."""
    return any(isinstance(item.sink, KeepMoments) and item.source != "own convolution" for item in passes)


@dataclass(frozen=True)
class Tile:
    """The tile of the GPU's passes over a value: elements of a row, or rows of channels."""

    block: int  # of the last pass
    block_c: int  # channels per tile; 0 if the value is contiguous and a tile has one channel
    moments_block: int
    tiles: int  # per program of the moments pass
    # Whole rows per tile if the rows of a contiguous value are short, in the last pass and for moments; 0 if a tile
    # lies within one row.
    rows: int = 0
    moments_rows: int = 0


@dataclass(frozen=True)
class CppPasses:
    """Our C++ kernels, on a CPU."""

    streams: bool = False  # the result is stored past the caches, which cannot hold it beside the value


@dataclass(frozen=True)
class TorchPasses:
    """PyTorch's operators, on a CPU without a compiler."""

    slab: int  # samples that go through all passes before the next ones do
    norms_in_place: bool = False  # a norm overwrites its value, which saves a second buffer and costs a pass
