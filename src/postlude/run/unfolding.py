"""An input of few channels as a matrix whose rows hold the channels of several taps (kernels/triton/unfold.py)."""

from __future__ import annotations

import math

from postlude.chain import Convolution
from postlude.plan.gemm import Gemm, volume_for
from postlude.plan.problem import Spec, power_of_two
from postlude.run.launch import Launch
from postlude.run.packing import Packer

# Positions of a tile, and elements of a program in both planes. A warp then has the same few columns of all its
# positions: 40 registers instead of 165, 0.30 ms instead of 0.46 for 128×8×256² in one plane (128 and 8192).
_BLOCK, _ELEMENTS = 32, 4096


class Unfolding(Packer):
    """A position holds the channels of several taps."""

    def __init__(self, x: Spec, conv: Convolution, gemm: Gemm) -> None:
        rows = x.shape[0] * gemm.volume.sample_rows
        super().__init__(x, gemm.arithmetic, (rows, gemm.volume.pitch, gemm.channels), tail=rows)
        self.launch = self._unfolding(x, conv, gemm)

    def _unfolding(self, x: Spec, conv: Convolution, gemm: Gemm) -> Launch:
        from postlude.kernels.triton.unfold import unfold_input_kernel

        volume, whole = gemm.volume, volume_for(conv, x.shape[2:], 1)
        rows, block = self.shape[0], min(_BLOCK, max(16, power_of_two(volume.pitch)))
        each = max(1, _ELEMENTS // (block * gemm.channels * self.arithmetic.planes))
        grid = (-(-rows // each) * -(-volume.pitch // block),)
        sizes = (*whole.space, *whole.padding, volume.pitch, volume.padded[1], volume.sample_rows)
        constants = {
            "CP": gemm.channels,
            "PLANES": self.arithmetic.planes,
            "SCALED": self.arithmetic.scaled,
            "KEEPS": self.arithmetic.keeps_infinities,
            "LAST": x.layout == "channels_last",
            "WIDE": math.prod(x.shape[1:]) >= 1 << 31,
            "TH": gemm.unfolded[0],
            "TW": gemm.unfolded[1],
            "PADS": any(whole.padding),
            "EACH": each,
            "BLOCK": block,
        }
        return Launch(unfold_input_kernel, grid, (rows, x.shape[1], *sizes), constants)
