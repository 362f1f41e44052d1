"""The epilogue that all our implicit GEMMs share: what they write, and which steps they fuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.plan import Plan
from postlude.plan.gemm import Gemm
from postlude.plan.passes import KeepMoments, Store
from postlude.plan.problem import Spec, memory_format
from postlude.plan.program import Steps
from postlude.stages.cuts import Partials, accumulator, accumulator_of, forward_steps, operands
from postlude.stages.trace import Pointer, Unread, launch, or_unread


class Epilogue:
    """Allocates and stores the convolution's result, its moments in `chunks` per sample, or both, as the plan says."""

    def __init__(
        self,
        plan: Plan,
        chunks: int,
        block_c: int,
        spread: str = "[None, :]",
        stored: tuple[int, ...] | None = None,
    ) -> None:
        """`chunks` are the parts of a sample with moments of their own, `block_c` the output channels of a tile.

        `spread` says how `emit` broadcasts a number per channel: in most GEMMs channels are a tile's last axis.
        `stored` is the shape of what is written, if it is not the value's.
        """
        item, (batch, channels, *_) = plan.passes[0], plan.value.shape
        blocks_c = -(-channels // block_c)
        self.stored = stored or plan.value.shape
        self.programs = batch * chunks * blocks_c
        self.channels = {"IS_EVEN_C": channels % block_c == 0, "BLOCKS_C": blocks_c}
        self.plan, self.last, self.chunks = plan, item.last, chunks
        self.moments, self.store = "no", "raw" if item.sink == Store(raw=True) else "done"
        if isinstance(item.sink, KeepMoments):
            self.moments = "both" if item.sink.squares else "sums"
            self.store = "no" if not item.sink.stores else "done" if item.sink.finished else "raw"
        is_last = plan.value.layout == "channels_last"
        self.written = {"STORE": self.store, "MOMENTS": self.moments, "IS_CHANNELS_LAST": is_last}
        self.before: Steps = forward_steps(plan.chain, "before", item.last, plan.value.shape[1], spread=spread)

    def launch(
        self,
        stem: str,
        kernel: str,
        grid: tuple[int, ...],
        product: Sequence[Pointer],
        unread: Tensor,
        tensors: Sequence[Tensor],
        numbers: tuple[int, ...],
        constants: dict[str, object],
        warps: int,
    ) -> tuple[Tensor | None, Partials | None]:
        """Launches the GEMM on the operands `product`. `unread` fills arguments that are neither read nor written."""
        plan, shape, device = self.plan, self.plan.value.shape, unread.device
        is_result = self.store == "done" and len(plan.passes) == 1
        value = None
        if self.store != "no":
            # Before a norm, the dtype that PyTorch's convolution returns; otherwise this is the chain's result.
            dtype = getattr(torch, plan.result_dtype if is_result else plan.value.dtype)
            layout = memory_format(plan.value.layout, plan.chain.dims)
            value = torch.empty(self.stored, dtype=dtype, device=device, memory_format=layout)
        partials = None
        if self.moments != "no":
            acc = accumulator_of(plan.value)
            mean = torch.empty((*shape[:2], self.chunks), dtype=acc, device=device)
            m2 = torch.empty_like(mean) if self.moments == "both" else mean
            count = torch.empty((shape[0], self.chunks), dtype=acc, device=device)
            partials = Partials(mean, m2, count)
        read = operands(plan.chain, self.last, plan.value, tensors, unread)
        results: list[Pointer] = [or_unread(value, unread), *(partials or [Unread(unread)] * 3)]
        if self.moments == "sums":
            results[2] = Unread(unread)
        launch(stem, kernel, grid, [*product, *results, *read], numbers, constants, warps)
        return value, partials


def product_tile(gemm: Gemm, value: Spec) -> dict[str, object]:
    """The constants that every GEMM over packed operands takes last."""
    return {
        "BLOCK_M": gemm.rows,
        "BLOCK_C": gemm.block_c,
        "BLOCK_K": gemm.block_k,
        "STAGES": gemm.stages,
        "ACC": accumulator(accumulator_of(value)),
    }
