"""Our convolution on the CPU, for few input channels and chains that keep only moments of its result."""

from __future__ import annotations

from dataclasses import dataclass

from postlude.chain import Chain
from postlude.plan.program import MomentsOnly, norm_hides_infinities

MOST_INPUTS = 4  # channels; oneDNN reaches half of the processor's peak with three of them, and more with eight
MOST_OUTPUTS = 256
MOST_TAPS = 7  # along an axis


@dataclass(frozen=True)
class CpuFewChannels:
    is_winograd: bool  # F(2, 3) along x, which turns infinities into NaN

    def __str__(self) -> str:
        return "staged blocks, two outputs of a row at a time" if self.is_winograd else "staged blocks, tap by tap"


def few_channels_for(chain: Chain, moments: MomentsOnly) -> CpuFewChannels | None:
    conv = chain.producer
    plain = None if conv is None else conv.as_plain()
    if plain is None or plain.groups > 1 or plain.in_channels > MOST_INPUTS or plain.out_channels > MOST_OUTPUTS:
        return None
    if any(stride > 1 for stride in plain.stride) or max(plain.kernel) > MOST_TAPS:
        return None
    if any(chain.roles[slot] == "full" for slot in range(len(chain.roles))):  # the kernel cannot index such an operand
        return None
    is_row_of_three = plain.kernel[-1] == 3 and plain.dilation[-1] == 1
    return CpuFewChannels(is_row_of_three and moments.squares and norm_hides_infinities(chain))
