"""The gradients of a layer_norm's chain on a GPU: all of them in one pass, but for what is summed over rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.chain import Normalize
from postlude.plan import Plan
from postlude.plan.problem import Spec, power_of_two
from postlude.plan.program import last_fused_step
from postlude.reverse import FULL, gradient, unsupported_gradient, wanted
from postlude.run.gradient import AddChannels
from postlude.run.launch import Launch, accumulator
from postlude.run.passes import Operands, accumulator_of
from postlude.run.programs import composed
from postlude.run.rows import rows_of, warps_for

_MOST_TILES = 16  # of one program: so many fewer partial sums are written


class RowsGradient:
    """As GradientPasses, for chains whose norm goes over rows."""

    def __init__(self, plan: Plan, needs: frozenset[int]) -> None:
        from postlude.kernels.triton.rows import rows_gradient_kernel

        chain, value, last = plan.chain, plan.value, last_fused_step(plan.chain)
        reason = unsupported_gradient(chain, last)
        if reason is not None:
            raise ValueError(f"no gradient passes: {reason}")
        norm = next(step for step in chain.steps if isinstance(step, Normalize))
        # In the order in which the kernel gives their sums.
        slots = [None if slot is None else slot.index for slot in (norm.bias, norm.weight)]
        self.rows = {slot: place for place, slot in enumerate(slots) if slot is not None and slot in needs}
        self.wanted = wanted(chain, last, needs)
        self.per_sample = [slot for slot in self.wanted.totals if chain.roles[slot] == "row"]
        self.dtype, self.acc = getattr(torch, plan.result_dtype), accumulator_of(value)
        self.operands = Operands(chain, last, value)
        self.launch, chunks, length = self._prepared(plan, last, needs, rows_gradient_kernel)
        self.sums = (len(self.wanted.totals), *value.shape[:2], chunks)
        programs = value.shape[0] * value.shape[1] * chunks
        self.columns = (2 if self.rows else 0, programs, length, 1)
        self.add = AddChannels(value, None, self.sums)
        self.add_rows = AddChannels(Spec((programs, length, 1), value.dtype, "contiguous"), None, self.columns)

    def __call__(
        self, value: Tensor, _: object, dy: Tensor, tensors: Sequence[Tensor], _largest: object = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The gradient at the first value, and each slot's in its dtype."""
        value, dy = value.contiguous(), dy.to(self.dtype).contiguous()
        operands = self.operands([value if slot in self.unread else t for slot, t in enumerate(tensors)], value)
        first = torch.empty_like(value)
        sums, columns = (torch.empty(shape, dtype=self.acc, device=value.device) for shape in (self.sums, self.columns))
        full = [torch.empty_like(value, dtype=tensors[slot].dtype) for slot in self.wanted.full]
        unread = [value] * (FULL - len(full))
        partial = [part if part.numel() else value for part in (sums, columns)]
        self.launch(value, dy, first, *partial, *full, *unread, *operands)
        gradients = dict(zip(self.wanted.full, full))
        totals = {s: place for place, s in enumerate(self.wanted.totals) if s not in self.per_sample}
        for slot in self.per_sample:
            total = sums[self.wanted.totals.index(slot)].sum(-1, dtype=torch.float64)  # [N, C]
            gradients[slot] = total.to(tensors[slot].dtype).view(tensors[slot].shape)
        for add, parts, places in ((self.add, sums, totals), (self.add_rows, columns, self.rows)):
            if places:
                dtype = functools.reduce(torch.promote_types, [tensors[slot].dtype for slot in places])
                added = add(None, parts, dtype)
                for slot, place in places.items():
                    total = added[place].sum() if tensors[slot].numel() == 1 else added[place]
                    gradients[slot] = total.to(tensors[slot].dtype).view(tensors[slot].shape)
        return first, gradients

    def _prepared(self, plan: Plan, last: int, needs: frozenset[int], kernel: Any) -> tuple[Launch, int, int]:
        """The launch, its chunks of a sample's channel, and the length of a row."""
        value = plan.value
        function = gradient(plan.chain, last, needs)
        # A residual's gradient does not depend on it, as a rule: then it need not be there at all.
        self.unread = {slot for slot in self.operands.slots if plan.chain.roles[slot] == "full"} - function.loaded
        length, in_channel, _, cut = rows_of(plan)
        cut["BLOCK_R"] = min(cut["BLOCK_R"], power_of_two(in_channel))
        tiles = min(_MOST_TILES, -(-in_channel // cut["BLOCK_R"]))
        chunks = -(-in_channel // (tiles * cut["BLOCK_R"]))
        constants = {
            "GRADIENT": composed(function, value.shape[1]),
            "TOTALS": len(self.wanted.totals),
            "FULL": len(self.wanted.full),
            "COLUMNS": 2 if self.rows else 0,
            **{name: cut[name] for name in ("BLOCK_R", "BLOCK_L", "ALIGN")},
            "ACC": accumulator(self.acc),
        }
        programs = value.shape[0] * value.shape[1] * chunks
        numbers = (value.shape[1], in_channel, length, chunks, tiles, programs)
        return Launch(kernel, (programs,), numbers, constants, 2 * warps_for(cut)), chunks, length
