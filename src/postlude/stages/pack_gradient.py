"""The last gradient pass where only our GEMMs read its result: it writes the result packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Normalize
from postlude.plan.problem import Spec, power_in
from postlude.plan.program import Steps
from postlude.reverse import MOST_FULL, Wanted
from postlude.stages.cuts import accumulator, accumulator_of, is_wide
from postlude.stages.pack import Packing
from postlude.stages.trace import Pointer, Unread, launch


@dataclass(frozen=True)
class LastPass:
    """The last gradient pass: what each of its kernels takes and returns. It reads the value and dy once."""

    spec: Spec  # the value's
    norm: Normalize | None
    wanted: Wanted
    steps: Steps
    per_group: int
    value: Tensor
    dy: Pointer
    means: tuple[Pointer, ...]  # the norm's mean and rstd, and the results of `_combine_sums`
    read: list[Pointer]  # the steps' tensors
    dtypes: list[torch.dtype]  # of gradients of the value's size

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "GRADIENT_FN": self.steps,
            "HAS_NORM": self.norm is not None,
            "NUM_SUMS": len(self.wanted.totals),
            "NUM_FULL": len(self.wanted.full),
        }

    def arguments(self, first: Tensor, chunks: int) -> tuple[Tensor, list[Tensor], list[Pointer]]:
        """Memory for sums per channel and chunk and for gradients of the value's size, and the kernel's first
        arguments.

        `first` is the memory for the gradient at the first value.
        """
        shape = (len(self.wanted.totals), *self.spec.shape[:2], chunks)
        sums = torch.empty(shape, dtype=accumulator_of(self.spec), device=self.value.device)
        full = [torch.empty_like(self.value, dtype=dtype) for dtype in self.dtypes]
        unread = Unread(self.value)
        outputs = [sums if sums.numel() else unread, *full, *[unread] * (MOST_FULL - len(full))]
        return sums, full, [self.value, self.dy, *self.means, first, *outputs]


def packed_gradient(last: LastPass, packing: Packing) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradient at the first value as a packed matrix of one plane."""
    spec, chunks = last.spec, packing.rows * packing.grid[1]
    first = packing.empty(last.value.device)
    sums, full, arguments = last.arguments(first, chunks)
    launch(
        "pack_gradient",
        "packed_gradient_kernel",
        packing.grid,
        [*arguments, *last.read],
        (*packing.numbers, chunks, last.per_group),
        {
            **last.constants,
            "C_PACKED": packing.shape[2],
            "IS_CHANNELS_LAST": spec.layout == "channels_last",
            **packing.tile,
            "USES_INT64": is_wide(spec),
            "ALIGN": power_in(packing.row, 16),
            "ACC": accumulator(accumulator_of(spec)),
        },
    )
    return first, sums, full
