"""The last pass of the gradients: what every form of it takes and gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from postlude.chain import Normalize
from postlude.plan.problem import Spec
from postlude.reverse import FULL, Wanted
from postlude.run.launch import Launch
from postlude.run.passes import accumulator_of


class LastGradientPass:
    """All steps backwards in one reading of the value and of dy: what is stored, and sums per channel and chunk."""

    launch: Launch  # each form makes its own
    has_place_for_largest = False

    def __init__(self, value: Spec, want: Wanted, chunks: int) -> None:
        self.shape = (len(want.totals), *value.shape[:2], chunks)
        self.acc = accumulator_of(value)

    def first(self, value: Tensor) -> Tensor:
        """Where the gradient at the first value goes."""
        return torch.empty_like(value)

    def __call__(
        self,
        value: Tensor,
        dy: Tensor,
        means: tuple[Tensor, ...],
        operands: list[Tensor | int],
        dtypes: list[torch.dtype],
        largest: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The gradient at the first value, the sums, and gradients of the value's size in `dtypes`.

        `largest`, zeros as packing.py has them, becomes the first's largest magnitudes where they are found here."""
        first = self.first(value)
        sums = torch.empty(self.shape, dtype=self.acc, device=value.device)
        full = [torch.empty_like(value, dtype=dtype) for dtype in dtypes]
        outputs = [first, sums if sums.numel() else value, *full, *[value] * (FULL - len(full))]
        if self.has_place_for_largest:
            outputs.append(value if largest is None else largest)
        self.launch(value, dy, *means, *outputs, *operands)
        return first, sums, full


def what_is_computed(program: Any, norm: Normalize | None, want: Wanted) -> dict[str, Any]:
    """The constants with which every kernel of such a pass begins."""
    return {
        "GRADIENT": program,
        "HAS_NORM": norm is not None,
        "TOTALS": len(want.totals),
        "FULL": len(want.full),
    }
