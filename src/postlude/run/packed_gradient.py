"""The last pass of the gradients where only matrix products of ours read what it finds: packed for them at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from postlude.chain import Normalize
from postlude.plan.problem import Spec, power_in
from postlude.reverse import Wanted
from postlude.run.last_gradient import LastGradientPass, what_is_computed
from postlude.run.launch import Launch, accumulator
from postlude.run.packing import InputPacking
from postlude.run.passes import sizes_of


class PackedGradientPass(LastGradientPass):
    """The gradient at the first value as a packed matrix (see packing.py) of one plane."""

    def __init__(
        self, value: Spec, packing: InputPacking, program: Any, norm: Normalize | None, want: Wanted, per_group: int
    ) -> None:
        from postlude.kernels.triton.pack_gradient import packed_gradient_kernel

        _, channels, positions = sizes_of(value)
        chunks = packing.rows * packing.grid[1]
        super().__init__(value, want, chunks)
        self.packing = packing
        constants: dict[str, Any] = {
            **what_is_computed(program, norm, want),
            "CP": packing.shape[2],
            "LAST": value.layout == "channels_last",
            **packing.tile,
            "WIDE": channels * positions >= 1 << 31,
            "ALIGN": power_in(packing.row, 16),
            "ACC": accumulator(self.acc),
        }
        numbers = (*packing.numbers, chunks, per_group)
        self.launch = Launch(packed_gradient_kernel, packing.grid, numbers, constants)

    def first(self, value: Tensor) -> Tensor:
        return self.packing.empty(value.device)
