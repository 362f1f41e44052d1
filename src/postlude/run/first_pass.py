"""What every matrix product of ours that convolves has in common: what it writes, and what follows it in its launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.plan import Plan
from postlude.plan.problem import memory_format
from postlude.plan.types import Moments, Store
from postlude.run.launch import Launch
from postlude.run.passes import Operands, Partials, accumulator_of
from postlude.run.programs import program


class FirstPass:
    """The convolution's result where it is stored, its moments where they are wanted, in `chunks` for each sample."""

    launch: Launch

    def __init__(self, plan: Plan, chunks: int, spread: str = "[None, :]") -> None:
        """`spread` as for `emit`: channels are the last axis of most products' blocks."""
        item = plan.passes[0]
        self.value, self.chunks = plan.value, chunks
        self.acc = accumulator_of(plan.value)
        self.moments, self.store = "no", "raw" if item.sink == Store(raw=True) else "done"
        if isinstance(item.sink, Moments):
            self.moments = "both" if item.sink.squares else "sums"
            self.store = "no" if not item.sink.stores else "done" if item.sink.finished else "raw"
        is_result = self.store == "done" and len(plan.passes) == 1
        # Before a norm the convolution's own dtype, as PyTorch would have it; else this is the result.
        self.dtype = getattr(torch, plan.result_dtype if is_result else plan.value.dtype)
        self.format = memory_format(plan.value.layout, plan.chain.dims)
        self.input_format = memory_format(plan.input.layout, plan.chain.dims)
        self.operands = Operands(plan.chain, item.last, plan.value)
        self.before = program(plan.chain, "before", item.last, plan.value.shape[1], spread=spread)

    def run(
        self, operands: Sequence[Any], unread: Tensor, tensors: Sequence[Tensor]
    ) -> tuple[Tensor | None, Partials | None]:
        """Launches it on the product's operands; `unread` stands where nothing is read or written."""
        device, shape = unread.device, self.value.shape
        value = None
        if self.store != "no":
            value = torch.empty(shape, dtype=self.dtype, device=device, memory_format=self.format)
        mean = m2 = count = unread
        if self.moments != "no":
            mean = torch.empty((*shape[:2], self.chunks), dtype=self.acc, device=device)
            m2 = torch.empty_like(mean) if self.moments == "both" else mean
            count = torch.empty((shape[0], self.chunks), dtype=self.acc, device=device)
        out = unread if value is None else value
        self.launch(*operands, out, mean, m2, count, *self.operands(tensors, unread))
        return value, None if self.moments == "no" else Partials(mean, m2, count)
