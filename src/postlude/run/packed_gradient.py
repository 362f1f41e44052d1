"""The last pass of the gradients where only matrix products of ours read what it finds: packed for them at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from postlude.chain import Normalize
from postlude.emit_gradient import FULL, Wanted
from postlude.plan.problem import Spec
from postlude.run.launch import Launch, accumulator
from postlude.run.packing import InputPacking
from postlude.run.passes import accumulator_of, sizes_of


class PackedGradientPass:
    """As `GradientPass`, but the gradient at the first value is a packed matrix (see packing.py) of one plane."""

    def __init__(
        self, value: Spec, packing: InputPacking, program: Any, norm: Normalize | None, want: Wanted, per_group: int
    ) -> None:
        from postlude.kernels.triton.pack_gradient import packed_gradient_kernel

        volume, tile = packing.volume, packing.tile
        batch, channels, positions = sizes_of(value)
        depth, height, _ = volume.space
        chunks = depth * height * packing.grid[1]
        self.packed, self.packed_dtype = packing.shape, packing.dtype
        self.shape = (len(want.totals), batch, channels, chunks)
        self.acc = accumulator_of(value)
        constants: dict[str, Any] = {
            "GRADIENT": program,
            "HAS_NORM": norm is not None,
            "TOTALS": len(want.totals),
            "FULL": len(want.full),
            "CP": packing.shape[2],
            "LAST": value.layout == "channels_last",
            **tile,
            "WIDE": channels * positions >= 1 << 31,
            "ACC": accumulator(self.acc),
        }
        numbers = (*packing.numbers, chunks, per_group)
        self.launch = Launch(packed_gradient_kernel, packing.grid, numbers, constants)

    def __call__(
        self,
        value: Tensor,
        dy: Tensor,
        means: tuple[Tensor, ...],
        operands: list[Tensor],
        dtypes: list[torch.dtype],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The packed gradient at the first value, the sums, and gradients of the value's size in `dtypes`."""
        packed = torch.empty(self.packed, dtype=self.packed_dtype, device=value.device)
        sums = torch.empty(self.shape, dtype=self.acc, device=value.device)
        full = [torch.empty_like(value, dtype=dtype) for dtype in dtypes]
        outputs = [packed, sums if sums.numel() else value, *full, *[value] * (FULL - len(full))]
        self.launch(value, dy, *means, *outputs, *operands)
        return packed, sums, full
