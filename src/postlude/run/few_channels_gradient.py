"""Gradients of a convolution of few input channels whose result nobody stored: kernels/cuda/few_channels_gradient.cu.

The gradient at the convolution's result v is affine in it, shift + slope · v, per sample and channel. The kernel reads
both from a table [N, COUT, 4]: shift and slope times 2^e, and e, which brings every magnitude under 2¹⁵.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from postlude.hardware import machine_for
from postlude.plan import Plan
from postlude.plan.few_channels import Geometry
from postlude.plan.few_channels_gradient import FewChannelsGradient, GradientPlan, gradient_shared_bytes
from postlude.plan.gemm import volume_for
from postlude.run import nvrtc
from postlude.run.few_channels import common_defines, geometry_of, options_of, source, weight_strides
from postlude.run.recording import recording

_ARGUMENTS = 36


class FewChannelsGradients:
    """Gradients of a convolution's input and weight from the table."""

    def __init__(self, plan: Plan, settings: GradientPlan) -> None:
        conv = plan.chain.producer
        assert conv is not None
        self.padding = volume_for(conv, plan.input.shape[2:], 1).padding
        self.settings, self.transposed, self.dims = settings, conv.transposed, conv.dims
        self.ready: dict[tuple[Any, ...], ReadyGradient] = {}

    def __call__(
        self, x: Tensor, weight: Tensor, table: Tensor, needs_input: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        if self.dims == 2:
            dx, dw = self._in_space(x.unsqueeze(2), weight.unsqueeze(2), table, needs_input, needs_weight)
            return (None if dx is None else dx.squeeze(2)), (None if dw is None else dw.squeeze(2))
        return self._in_space(x, weight, table, needs_input, needs_weight)

    def _in_space(
        self, x: Tensor, weight: Tensor, table: Tensor, needs_input: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        key = (x.device.index, x.stride(), weight.stride(), needs_input, needs_weight)
        ready = self.ready.get(key)
        if ready is None:
            settings = self.settings.both if needs_input else self.settings.weight
            wanted = (needs_weight, needs_input)
            ready = self.ready[key] = ReadyGradient(x, weight, self.padding, settings, self.transposed, wanted)
        return ready(x, weight, table)


def gradient_defines(settings: FewChannelsGradient, shape: Geometry, wanted: tuple[bool, bool]) -> tuple[str, ...]:
    """The compiler's options; `wanted`: the weight's gradient, and the input's."""
    return options_of(all_gradient_defines(settings, shape, wanted))


def all_gradient_defines(settings: FewChannelsGradient, shape: Geometry, wanted: tuple[bool, bool]) -> dict[str, int]:
    if settings.warps % settings.splits or shape.channel_blocks > 1:
        raise ValueError(f"{settings} and {shape} are not for this kernel: splits divide warps, 32 channels at most")
    return common_defines(settings, shape) | {
        "WEIGHT": int(wanted[0]),
        "INPUT": int(wanted[1]),
        "SPLITS": settings.splits,
        "PROMOTE": settings.promote,
        "SHARED_BYTES": gradient_shared_bytes(settings, shape, wanted[1]),
    }


@functools.cache
def _kernel(settings: FewChannelsGradient, shape: Geometry, wanted: tuple[bool, bool], device: int) -> nvrtc.Kernel:
    architecture = machine_for(f"cuda:{device}").card.architecture
    options = (f"--gpu-architecture={architecture}", *gradient_defines(settings, shape, wanted))
    shared = gradient_shared_bytes(settings, shape, wanted[1])
    code = source("few_channels_gradient.cu")
    return nvrtc.load(code, "few_channels_gradient", options, device, shared, _ARGUMENTS)


class ReadyGradient:
    """The kernel, compiled and with every argument but the pointers, for tensors of these shapes and strides."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        padding: tuple[int, int, int],
        settings: FewChannelsGradient,
        transposed: bool,
        wanted: tuple[bool, bool],
    ) -> None:
        shape, out = geometry_of(x, weight, None, padding, transposed)
        d, h, w = x.shape[2:]
        deep, high, per_row = settings.tiles_along(shape, (d, h, w), wanted[1])
        per_plane = high * per_row
        units = x.shape[0] * deep * per_plane
        if units >= 1 << 31:
            raise ValueError(f"an input of {tuple(x.shape)} is too large for this kernel")
        self.macros = all_gradient_defines(settings, shape, wanted)
        self.load = functools.partial(_kernel, settings, shape, wanted)  # onto a device
        self.kernel = None if x.is_meta else self.load(x.device.index or 0)
        self.wanted, self.threads = wanted, settings.warps * 32
        blocks = min(units, settings.programs) if settings.programs else units
        self.grid = (blocks, 1)
        self.parts = (blocks * settings.splits, weight.numel())
        dx_like = torch.empty_like(x, device="meta")
        dw_like = torch.empty(weight.shape, device="meta")
        tiles = (units, deep * per_plane, per_plane, per_row)
        strides = (*weight_strides(weight, transposed), *weight_strides(dw_like, transposed))
        self.sizes = (*tiles, *out, *x.stride(), d, h, w, *dx_like.stride(), *strides, 0)

    def __call__(self, x: Tensor, weight: Tensor, table: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dx = torch.empty_like(x) if self.wanted[1] else None
        parts = torch.empty(self.parts, dtype=torch.float32, device=x.device) if self.wanted[0] else None
        if self.kernel is None:
            assert recording.active is not None
            recording.active.cuda(
                "few_channels_gradient.cu", "few_channels_gradient", self, (x, weight, table, parts, dx)
            )
        else:
            self._launch(self.kernel, x, weight, table, parts, dx)
        if parts is None:
            return dx, None
        return dx, parts.sum(0, dtype=torch.float64).to(weight.dtype).view(weight.shape)

    def _launch(
        self, kernel: nvrtc.Kernel, x: Tensor, weight: Tensor, table: Tensor, parts: Tensor | None, dx: Tensor | None
    ) -> None:
        results = (0 if parts is None else parts.data_ptr(), 0 if dx is None else dx.data_ptr())
        pointers = (x.data_ptr(), weight.data_ptr(), table.data_ptr(), *results)
        kernel.launch(self.grid, self.threads, (*pointers, *self.sizes))
