"""Our convolution on the CPU, for few input channels and chains that keep only moments of its result."""

from __future__ import annotations

import math
from dataclasses import dataclass

from postlude.chain import Chain, Convolution
from postlude.plan.barriers import MomentsOnly, norm_hides_infinities

MOST_INPUTS = 4  # channels; oneDNN reaches half of the processor's peak with three of them, and more with eight
MOST_OUTPUTS = 256
MOST_TAPS = 7  # along an axis
MOST_CORRELATED = 3  # taps along an axis: five have nine lags
LANES = 8  # numbers of a vector
# Measured on AVX2 with one thread: a product of correlations takes as long as one of the convolution, longer with one
# or two channels, whose registers hold few sums. A sample takes as much time more as these products.
SLOWER = {1: 2.5, 2: 1.25}
FIXED_PER_LAG = 1000
FIXED_PER_OUTPUT = 30_000
CLEARLY = 0.8  # of the convolution's time


@dataclass(frozen=True)
class CpuFewChannels:
    is_winograd: bool  # F(2, 3) along x, which turns infinities into NaN
    is_correlated: bool = False  # first from correlations of the input; the convolution only where these cancel

    def __str__(self) -> str:
        way = "staged blocks, two outputs of a row at a time" if self.is_winograd else "staged blocks, tap by tap"
        return f"moments from correlations of the input; where they cancel, {way}" if self.is_correlated else way


def few_channels_for(chain: Chain, moments: MomentsOnly, space: tuple[int, ...]) -> CpuFewChannels | None:
    conv = chain.producer
    plain = None if conv is None else conv.as_plain()
    if plain is None or plain.groups > 1 or plain.in_channels > MOST_INPUTS or plain.out_channels > MOST_OUTPUTS:
        return None
    if any(stride > 1 for stride in plain.stride) or max(plain.kernel) > MOST_TAPS:
        return None
    if any(chain.roles[slot] == "full" for slot in range(len(chain.roles))):  # the kernel cannot index such an operand
        return None
    is_row_of_three = plain.kernel[-1] == 3 and plain.dilation[-1] == 1
    is_winograd = is_row_of_three and moments.squares and norm_hides_infinities(chain)
    is_plain = moments.before == 0 and moments.squares
    return CpuFewChannels(is_winograd, is_plain and _pays(plain, space, is_winograd))


def _pays(conv: Convolution, space: tuple[int, ...], is_winograd: bool) -> bool:
    """Whether sums of products of the input with itself, for all lags between two taps, take clearly less time than
    the convolution."""
    outputs = conv.output_space(space)
    if max(conv.kernel) > MOST_CORRELATED or max(conv.dilation) > 1:
        return False
    if any(size < taps for size, taps in zip(outputs, conv.kernel)):  # the first and last positions would overlap
        return False
    padded = [size + 2 * padding for size, padding in zip(space, conv.padding)]
    padded[-1] = -(-padded[-1] // LANES) * LANES
    lags = (math.prod(2 * taps - 1 for taps in conv.kernel) * conv.in_channels**2 + conv.in_channels) / 2
    taps = math.prod(conv.kernel) * conv.in_channels
    products = SLOWER.get(conv.in_channels, 1.0) * lags * math.prod(padded)
    correlated = products + FIXED_PER_LAG * lags + FIXED_PER_OUTPUT * conv.out_channels
    convolved = taps * conv.out_channels * math.prod(outputs) * (2 / 3 if is_winograd else 1)
    return correlated < CLEARLY * convolved
