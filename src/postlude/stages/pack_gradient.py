"""The last pass of the gradients where only matrix products of ours read what it finds: packed for them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Normalize
from postlude.plan.calls import Steps
from postlude.plan.problem import Spec, power_in
from postlude.reverse import FULL, Wanted
from postlude.stages.cuts import accumulator, accumulator_of, is_wide
from postlude.stages.pack import Packing
from postlude.stages.trace import Pointer, Unread, launch


@dataclass(frozen=True)
class LastPass:
    """All steps backwards in one reading of the value and of dy: what every form of that pass takes and gives."""

    value: Spec
    norm: Normalize | None
    wanted: Wanted
    steps: Steps
    per_group: int

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "GRADIENT": self.steps,
            "HAS_NORM": self.norm is not None,
            "TOTALS": len(self.wanted.totals),
            "FULL": len(self.wanted.full),
        }

    def outputs(
        self, value: Tensor, chunks: int, dtypes: list[torch.dtype]
    ) -> tuple[Tensor, list[Tensor], list[Pointer]]:
        """Sums per channel and chunk, gradients of the value's size in `dtypes`, and both as arguments."""
        shape = (len(self.wanted.totals), *self.value.shape[:2], chunks)
        sums = torch.empty(shape, dtype=accumulator_of(self.value), device=value.device)
        full = [torch.empty_like(value, dtype=dtype) for dtype in dtypes]
        unread = Unread(value)
        return sums, full, [sums if sums.numel() else unread, *full, *[unread] * (FULL - len(full))]


def packed_gradient(
    last: LastPass,
    packing: Packing,
    value: Tensor,
    dy: Tensor,
    means: tuple[Pointer, ...],
    read: list[Pointer],
    dtypes: list[torch.dtype],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradient at the first value as a packed matrix of one plane."""
    spec, chunks = last.value, packing.rows * packing.grid[1]
    first = packing.empty(value.device)
    sums, full, outputs = last.outputs(value, chunks, dtypes)
    launch(
        "pack_gradient",
        "packed_gradient_kernel",
        packing.grid,
        [value, dy, *means, first, *outputs, *read],
        (*packing.numbers, chunks, last.per_group),
        {
            **last.constants,
            "CP": packing.shape[2],
            "LAST": spec.layout == "channels_last",
            **packing.tile,
            "WIDE": is_wide(spec),
            "ALIGN": power_in(packing.row, 16),
            "ACC": accumulator(accumulator_of(spec)),
        },
    )
    return first, sums, full
